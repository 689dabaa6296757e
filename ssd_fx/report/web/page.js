"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const COLORS = {
    light: { text: "#1b1f24", muted: "#626a75", line: "#e1e4e9", axis: "#aab1bb", bg: "#ffffff", stock: "#8b93a0",
      own: "#2563eb", area: "rgba(37,99,235,.10)", seen: "#d97706", forward: "#64748b", backward: "#94a3b8",
      wait: "#dc2626", write: "#0d9488", read: "#8b5cf6", keep: "#9aa5b5", gone: "rgba(37,99,235,.13)", chosen: "#1b1f24" },
    dark: { text: "#e4e7ec", muted: "#98a1ae", line: "#2a303a", axis: "#59626f", bg: "#14171c", stock: "#8b93a0",
      own: "#6d9bff", area: "rgba(109,155,255,.14)", seen: "#f2a93b", forward: "#7d8ca3", backward: "#566275",
      wait: "#ff6b6b", write: "#2dc4b2", read: "#ab90ff", keep: "#66707f", gone: "rgba(109,155,255,.16)", chosen: "#ffffff" },
  };
  const LANES = ["compute", "waits", "writes", "reads"];
  const ROW = 20, MOST = 26, FOLD_FROM = 60, LABEL = 11.5;
  const state = { query: "", fold: data.groups.length > FOLD_FROM, scale: false, chosen: null };
  const c = () => COLORS[dark.matches ? "dark" : "light"];

  function bytes(n) {
    const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
    const sign = n < 0 ? "\u2212" : "", size = Math.abs(n);
    for (const [unit, one] of units) if (size >= one) return sign + +(size / one).toPrecision(4) + "\u00a0" + unit;
    return sign + Math.round(size) + "\u00a0B";
  }
  const time = (ms) => (Math.abs(ms) >= 1000 ? +(ms / 1000).toPrecision(4) + "\u00a0s" : +ms.toPrecision(4) + "\u00a0ms");
  function element(name, text, attributes) {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const key in attributes || {}) made.setAttribute(key, attributes[key]);
    return made;
  }
  const escaped = (text) => element("i", text).innerHTML;
  const layerOf = (row) => {
    if (row.run !== null) return `run ${row.run + 1}`;
    const parts = (row.module || "").split("."), at = parts.findIndex((each) => /^\d+$/.test(each));
    return at < 0 ? parts[0] || "outside of modules" : parts.slice(0, at + 1).join(".");
  };
  const called = (row) => `${row.run === null ? "" : `run ${row.run + 1} `}${row.module || row.source || row.name}`;
  const waits = (times) => [times.release, times.wait].filter(([a, b]) => b > a);
  const matches = (row) => {
    const text = [layerOf(row), called(row), row.source, row.name, row.decision, row.reason, row.graph].join(" ").toLowerCase();
    return state.query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  };

  // Measured times, stretched so that forward and backward are as long as predicted.
  const seen = data.measured, own = data.own;
  const ratio = seen && own.end ? seen.end / own.end : 1;
  state.scale = ratio > 1.25 || ratio < 0.8;
  function at(ms) {
    if (!state.scale || !seen.turn || seen.end <= seen.turn) return ms;
    if (ms <= seen.turn) return (ms * own.turn) / seen.turn;
    return own.turn + ((ms - seen.turn) * (own.end - own.turn)) / (seen.end - seen.turn);
  }
  const spans = (list) => list.map(([a, b]) => [at(a), at(b), b - a]);
  const end = () => Math.max(data.stock.end, own.end, seen ? at(seen.end) : 0);

  let rows = [], shown = [];
  function refilter() {
    rows = data.groups.filter(matches);
    const timed = rows.filter((row) => row.times);
    if (!state.fold) {
      shown = timed.map((row) => ({ label: `${called(row)}${row.module ? ` \u00b7 ${row.name}` : ""}`, rows: [row] }));
    } else {
      const folded = new Map();
      for (const row of timed) {
        const layer = layerOf(row);
        if (!folded.has(layer)) folded.set(layer, []);
        folded.get(layer).push(row);
      }
      shown = [...folded].map(([label, list]) => ({ label: `${label} (${list.length})`, rows: list, folded: true }));
    }
    const total = rows.reduce((sum, row) => sum + row.nbytes, 0);
    $("count").textContent = `${rows.length} of ${data.groups.length} groups, ${bytes(total)}`;
  }

  const chart = echarts.init($("chart"), null, { renderer: "canvas" });
  const heights = () => ({ memory: 220, lanes: 30 * LANES.length, groups: ROW * Math.max(1, Math.min(shown.length, MOST)) });

  function lane(items) {  // [from, to, lane, kind, measured ms or -1]
    const made = [];
    const push = (list, index, kind, measured) => {
      for (const span of measured ? spans(list) : list) made.push([span[0], span[1], index, kind, measured ? span[2] : -1]);
    };
    for (const [found, measured] of [[own, false], [seen, true]]) {
      if (!found) continue;
      push(found.compute[0], 0, "forward", measured);
      push(found.compute[1], 0, "backward", measured);
      push(found.waits, 1, "wait", measured);
      push(found.writes, 2, "write", measured);
      push(found.reads, 3, "read", measured);
    }
    return made;
  }
  function drawLane(params, api) {
    const measured = api.value(4) >= 0, kind = api.value(3);
    const [x0, y] = api.coord([api.value(0), api.value(2)]), [x1] = api.coord([api.value(1), api.value(2)]);
    const height = seen ? 10 : 18;
    const top = seen ? y + (measured ? 1 : -height - 1) : y - height / 2;
    return clipped(params, x0, x1, top, height, { fill: c()[kind], opacity: measured ? 0.55 : 1 });
  }
  function clipped(params, x0, x1, y, height, style) {
    const area = params.coordSys;
    const shape = echarts.graphic.clipRectByRect({ x: x0, y, width: Math.max(x1 - x0, 1), height }, area);
    return shape && { type: "rect", shape, style };
  }

  const PARTS = { live: 0, gone: 1, write: 2, read: 3, wait: 4, seen: 5, layer: 6 };
  function inMemory(list) {  // of the groups of a layer: [from, to, bytes]
    const changes = [];
    for (const { times: t, nbytes } of list) {
      changes.push([t.store[0], nbytes], [t.last[1], -nbytes]);
      if (t.gone && t.gone[1] > t.gone[0]) changes.push([t.gone[0], -nbytes], [t.gone[1], nbytes]);
    }
    changes.sort((a, b) => a[0] - b[0]);
    const spans = [];
    let level = 0;
    changes.forEach(([x, change], i) => {
      level += change;
      const next = i + 1 < changes.length ? changes[i + 1][0] : x;
      if (next > x) spans.push([x, next, level]);
    });
    return spans;
  }
  function bars() {  // [from, to, line, part, index of the group, bytes of a layer, its most]
    const made = [];
    shown.forEach((line, y) => {
      if (line.folded) {
        const spans = inMemory(line.rows), most = Math.max(...spans.map((span) => span[2]));
        for (const [a, b, level] of spans) made.push([a, b, y, PARTS.layer, data.groups.indexOf(line.rows[0]), level, most]);
      }
      for (const row of line.rows) {
        const t = row.times, index = data.groups.indexOf(row), add = (a, b, part) => made.push([a, b, y, part, index]);
        if (line.folded) { /* drawn above */ } else if (t.gone && t.gone[1] > t.gone[0]) {
          add(t.store[0], t.gone[0], PARTS.live);
          add(t.gone[0], t.gone[1], PARTS.gone);
          add(t.gone[1], t.last[1], PARTS.live);
        } else add(t.store[0], t.last[1], PARTS.live);
        if (t.write) add(t.write[0], t.write[1], PARTS.write);
        if (t.read) add(t.read[0], t.read[1], PARTS.read);
        for (const [a, b] of waits(t)) add(a, b, PARTS.wait);
        for (const kind of ["write", "read"]) if (row.seen[kind]) {
          const [a, b] = row.seen[kind];
          add(at(a), at(b), PARTS.seen);
        }
      }
    });
    return made;
  }
  function drawBar(params, api) {
    const part = api.value(3), row = data.groups[api.value(4)];
    const [x0, y] = api.coord([api.value(0), api.value(2)]), [x1] = api.coord([api.value(1), api.value(2)]);
    const chosen = state.chosen === row;
    if (part === PARTS.live || part === PARTS.gone) {
      const fill = part === PARTS.gone ? c().gone : row.decision === "offload" ? c().own : c().keep;
      const style = { fill };
      if (chosen) Object.assign(style, { stroke: c().chosen, lineWidth: 1.5 });
      return clipped(params, x0, x1, y - 7, 9, style);
    }
    if (part === PARTS.layer) {
      const style = { fill: c().own, opacity: 0.1 + 0.9 * (api.value(5) / Math.max(1, api.value(6))) };
      return clipped(params, x0, x1, y - 7, 9, style);
    }
    const fill = { 2: c().write, 3: c().read, 4: c().wait, 5: c().seen }[part];
    const top = part === PARTS.seen ? y + 6 : y + 2.5;
    return clipped(params, x0, x1, top, part === PARTS.seen ? 2 : 3, { fill });
  }

  function valueAt(points, x) {
    const next = points.findIndex(([from]) => from > x);
    if (next > 0) return points[next - 1][1];
    return points.length && x === points[points.length - 1][0] ? points[points.length - 1][1] : null;
  }
  const measuredPoints = () => (seen ? seen.points.map(([x, y]) => [at(x), y]) : []);
  function memoryTip(list) {
    const x = list[0].axisValue, text = [`<b>${time(x)}</b>`];
    const curves = [["without ssd_fx", data.stock.points], ["with, predicted", own.points], ["with, measured", measuredPoints()]];
    for (const [name, points] of curves) {
      const found = valueAt(points, x);
      if (found !== null) text.push(`${name} <b>${bytes(found)}</b>`);
    }
    return text.join("<br>");
  }
  function groupTip(params) {
    const row = data.groups[params.value[4]];
    if (params.value[3] === PARTS.layer)
      return `<b>${escaped(layerOf(row))}</b><br>${bytes(params.value[5])} of ${bytes(params.value[6])} in memory<br>` +
        `${time(params.value[0])} to ${time(params.value[1])}<br>click to unfold`;
    const text = [`<b>${escaped(called(row))}</b>`, escaped(row.source || row.name),
      `${bytes(row.nbytes)}, ${escaped(row.decision)}${row.reason ? `: ${escaped(row.reason)}` : ""}`];
    const what = ["in memory", "not in memory", "write", "read", "wait", "measured transfer"][params.value[3]];
    text.push(`${what}: ${time(params.value[0])} to ${time(params.value[1])}`);
    return text.join("<br>");
  }
  function laneTip(params) {
    const [a, b, , kind, measured] = params.value;
    return measured < 0 ? `${kind}, predicted: ${time(b - a)}<br>${time(a)} to ${time(b)}` : `${kind}, measured: ${time(measured)}`;
  }

  function step(highest) {  // of the axis of memory: 1, 2, 5, 10, ... of a unit, for about four lines
    let unit = 1;
    while (unit * 1024 <= highest / 4) unit *= 1024;
    const wanted = highest / 4 / unit, ten = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
    return unit * ten * [1, 2, 5, 10].find((each) => each * ten >= wanted);
  }
  function labels() {  // the width of the longest name of a row, up to two fifths of the page; what is longer loses its begin
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `${LABEL}px ${getComputedStyle(document.body).fontFamily}`;
    const wide = (text) => pen.measureText(text).width;
    const width = Math.ceil(Math.min(Math.max(120, ...shown.map((each) => wide(each.label))), 0.4 * chart.getWidth()));
    const whole = (text) => {
      let from = 0;
      while (wide(text.slice(from)) > width - (from ? wide("\u2026") : 0)) from += 1;
      return from ? `\u2026${text.slice(from)}` : text;
    };
    return { width, whole };
  }
  function option() {
    const size = heights(), color = c(), label = labels(), left = label.width + 20, right = 34;
    const tops = [30, 30 + size.memory + 34, 30 + size.memory + 34 + size.lanes + 40];
    const axis = (index, named) => ({
      type: "value", gridIndex: index, min: 0, max: end(), axisLine: { lineStyle: { color: color.axis } },
      splitLine: { show: index < 1, lineStyle: { color: color.line } }, axisTick: { lineStyle: { color: color.axis } },
      axisLabel: { show: named, color: color.muted, hideOverlap: true, showMaxLabel: false, formatter: (ms) => time(ms).replace("\u00a0", " ") },
      axisPointer: { show: true, label: { show: false }, lineStyle: { color: color.axis } },
      name: index === 2 ? "time from the start of the forward" : "", nameLocation: "middle", nameGap: 28,
      nameTextStyle: { color: color.muted },
    });
    const names = (list, index) => ({
      type: "category", gridIndex: index, inverse: true, data: list, axisLine: { show: false }, axisTick: { show: false },
      axisLabel: { color: color.muted, formatter: label.whole, interval: 0, fontSize: LABEL }, splitLine: { show: false },
    });
    const turn = { silent: true, symbol: "none", animation: false, label: { show: false },
      lineStyle: { color: color.axis, type: "dashed", width: 1 }, data: [{ xAxis: own.turn }] };
    const highest = Math.max(data.floor, ...[data.stock.points, own.points, seen ? seen.points : []].flat().map((p) => p[1]));
    const line = (name, points, style, more) => Object.assign({ name, type: "line", step: "end", symbol: "none", data: points,
      lineStyle: style, itemStyle: { color: style.color }, emphasis: { disabled: true }, animation: false }, more);
    const zoom = chart.getOption() && chart.getOption().dataZoom;
    const kept = zoom && zoom[0] ? { startValue: zoom[0].startValue, endValue: zoom[0].endValue } : {};
    return {
      animation: false, backgroundColor: color.bg, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      // ECharts asks this formatter, and not the grid's, for a tooltip of an axis. Other series have their own.
      tooltip: { trigger: "item", formatter: memoryTip, confine: true, backgroundColor: color.bg, borderColor: color.line,
        textStyle: { color: color.text, fontSize: 12.5 }, extraCssText: "max-width:460px;white-space:normal" },
      title: [
        { text: "Memory", left: 0, top: tops[0] - 28 }, { text: "Lanes", left: 0, top: tops[1] - 26 },
        { text: state.fold ? "Alias groups, by layer" : "Alias groups", left: 0, top: tops[2] - 28 },
      ].map((each) => ({ textStyle: { fontSize: 13, fontWeight: 600, color: color.text }, ...each })),
      grid: [
        { left, right, top: tops[0], height: size.memory, tooltip: { trigger: "axis" } },
        { left, right, top: tops[1], height: size.lanes },
        { left, right, top: tops[2], height: size.groups },
      ],
      xAxis: [axis(0, true), axis(1, false), axis(2, true)],
      yAxis: [
        { type: "value", gridIndex: 0, min: 0, interval: step(highest), max: Math.ceil(highest / step(highest)) * step(highest),
          axisLabel: { color: color.muted, formatter: bytes }, splitLine: { lineStyle: { color: color.line } } },
        names(LANES, 1), names(shown.map((each) => each.label), 2),
      ],
      dataZoom: [
        { type: "inside", xAxisIndex: [0, 1, 2], filterMode: "weakFilter", ...kept },
        { type: "slider", yAxisIndex: 2, show: shown.length > MOST, width: 12, right: 6, filterMode: "weakFilter",
          startValue: 0, endValue: MOST - 1, zoomLock: true, brushSelect: false, showDetail: false, handleSize: 0,
          showDataShadow: false, borderColor: "transparent", backgroundColor: color.line, fillerColor: color.axis },
        { type: "inside", yAxisIndex: 2, disabled: shown.length <= MOST, zoomOnMouseWheel: false, moveOnMouseMove: true,
          moveOnMouseWheel: "shift", startValue: 0, endValue: MOST - 1, filterMode: "weakFilter" },
      ],
      series: [
        line("without ssd_fx", data.stock.points, { color: color.stock, width: 1.5, type: "dashed" }),
        line("with, predicted", own.points, { color: color.own, width: 1.8 }, { areaStyle: { color: color.area },
          markLine: { ...turn, data: [{ xAxis: own.turn, label: { show: true, formatter: "forward | backward", position: "end",
            distance: 4, color: color.muted, fontSize: 11.5 } }, { yAxis: data.floor, lineStyle: { type: "dotted", color: color.muted, width: 1.5 } }] } }),
        line("with, measured", measuredPoints(), { color: color.seen, width: 1.5 }),
        { type: "custom", xAxisIndex: 1, yAxisIndex: 1, renderItem: drawLane, data: lane(), encode: { x: [0, 1], y: 2 },
          tooltip: { formatter: laneTip }, markLine: turn },
        { id: "bars", type: "custom", xAxisIndex: 2, yAxisIndex: 2, renderItem: drawBar, data: bars(), encode: { x: [0, 1], y: 2 },
          tooltip: { formatter: groupTip }, markLine: turn },
      ],
    };
  }

  function legend() {
    const color = c(), list = [["without ssd_fx", color.stock], ["with, predicted", color.own]];
    if (seen) list.push(["measured", color.seen]);
    list.push([`floor ${bytes(data.floor)}`, `repeating-linear-gradient(90deg, ${color.muted} 0 2px, transparent 2px 5px)`, 2]);
    list.push(["forward", color.forward], ["backward", color.backward], ["wait", color.wait], ["write", color.write],
      ["read", color.read]);
    if (state.fold) list.push(["bytes of the layer in memory: darker is more", color.own]);
    else list.push(["in memory", color.own], ["not in memory", color.gone], ["kept", color.keep]);
    $("legend").replaceChildren(...list.map(([name, fill, height]) => {
      const item = element("li"), swatch = element("i");
      swatch.style.background = fill;
      if (height) Object.assign(swatch.style, { height: `${height}px`, verticalAlign: "3px" });
      item.append(swatch, name);
      return item;
    }));
    if (seen) $("legend").append(element("li", "Lanes: above as predicted, below (paler) as measured."));
  }

  function redraw() {
    refilter();
    const size = heights();
    $("chart").style.height = `${30 + size.memory + 34 + size.lanes + 40 + size.groups + 52}px`;
    chart.resize();
    chart.setOption(option(), { notMerge: true });
    legend();
    table();
  }

  const COLUMNS = [["module", (r) => (r.run === null ? "" : `run ${r.run + 1} `) + (r.module || "(no module)")], ["tensor", (r) => r.name], ["source", (r) => r.source], ["bytes", (r) => bytes(r.nbytes)],
    ["decision", (r) => r.decision + (r.tier ? ` ${r.tier}` : "")], ["reason", (r) => r.reason]];
  function table() {
    const head = element("tr");
    for (const [name] of COLUMNS) head.append(element("th", name, { class: name === "bytes" ? "number" : "", scope: "col" }));
    $("table").tHead.replaceChildren(head);
    $("table").tBodies[0].replaceChildren(...rows.map((row, i) => {
      const line = element("tr", null, { tabindex: i ? -1 : 0, "aria-selected": state.chosen === row });
      for (const [name, of] of COLUMNS) line.append(element("td", of(row), { class: name === "bytes" ? "number" : "" }));
      line.addEventListener("click", () => choose(row));
      line.addEventListener("keydown", (event) => {
        const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
        if (next) { next.focus(); event.preventDefault(); }
        if (event.key === "Enter" || event.key === " ") { choose(row); event.preventDefault(); }
      });
      return line;
    }));
  }

  function choose(row) {
    state.chosen = row;
    const list = element("dl"), t = row.times;
    const put = (name, text) => text && list.append(element("dt", name), element("dd", text));
    put("module", called(row));
    put("source", row.source);
    put("node", row.name);
    put("graph", `${row.graph}, slot ${row.slot}`);
    put("bytes", bytes(row.nbytes) + (row.stored_nbytes === row.nbytes ? "" : `, of which ${bytes(row.stored_nbytes)} are stored`));
    put("decision", row.decision + (row.tier ? ` to ${row.tier}` : ""));
    put("reason", row.reason);
    put("shared", { output: "the caller gets it as an output", input: "the caller has passed it in" }[row.shared]);
    if (t) {
      put("produced", time(t.store[0]));
      put("written", t.write && `${time(t.write[0])} to ${time(t.write[1])}`);
      put("released", time(t.release[0]));
      put("read", t.read && `${time(t.read[0])} to ${time(t.read[1])}`);
      put("used", `${time(t.wait[1])} to ${time(t.last[1])}`);
      put("waited for", waits(t).length ? time(waits(t).reduce((sum, [a, b]) => sum + b - a, 0)) : "");
    }
    for (const [kind, name] of [["write", "written"], ["read", "read"], ["wait", "waited for"]])
      put(`measured: ${name}`, row.seen[kind] && `${time(row.seen[kind][0])} to ${time(row.seen[kind][1])}`);
    if (row.measured) {
      for (const name of ["freed", "wasted", "held", "kept"])
        put(`all steps: ${name}`, row.measured[name] ? bytes(row.measured[name]) : "");
      put("why", row.measured.why);
      const stall = row.measured.write_stall_s + row.measured.read_stall_s;
      put("all steps: waited for", stall ? time(1000 * stall) : "");
    }
    $("details").replaceChildren(list);
    chart.setOption({ series: [{ id: "bars", renderItem: drawBar, data: bars() }] });
    for (const line of $("table").tBodies[0].rows) line.setAttribute("aria-selected", rows[line.sectionRowIndex] === row);
  }

  function zoomed() {
    const found = chart.getOption().dataZoom[0];
    return [found.startValue === undefined || found.startValue === null ? 0 : found.startValue,
      found.endValue === undefined || found.endValue === null ? end() : found.endValue];
  }
  function show(from, to) {
    const width = Math.min(to - from, end()), start = Math.max(0, Math.min(from, end() - width));
    chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue: start, endValue: start + width });
  }
  function zoom(factor) {
    const [a, b] = zoomed(), middle = (a + b) / 2, half = ((b - a) * factor) / 2;
    show(middle - half, middle + half);
  }
  function move(share) {
    const [a, b] = zoomed(), by = (b - a) * share;
    show(a + by, b + by);
  }
  const KEYS = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, end()),
    ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25) };
  $("chart").addEventListener("keydown", (event) => {
    if (KEYS[event.key]) { KEYS[event.key](); event.preventDefault(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== $("search")) { $("search").focus(); event.preventDefault(); }
  });
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("reset").addEventListener("click", () => show(0, end()));
  $("search").addEventListener("input", (event) => { state.query = event.target.value.trim(); redraw(); });
  $("fold").addEventListener("change", (event) => { state.fold = event.target.checked; redraw(); });
  $("scale").addEventListener("change", (event) => { state.scale = event.target.checked; redraw(); show(0, end()); });
  chart.on("click", (params) => {
    if (params.seriesId !== "bars") return;
    const row = data.groups[params.value[4]];
    if (params.value[3] !== PARTS.layer) return choose(row);
    $("search").value = state.query = layerOf(row);
    $("fold").checked = state.fold = false;
    redraw();
  });
  dark.addEventListener("change", redraw);
  window.addEventListener("resize", redraw);

  $("scope").textContent = `${data.graphs.length === 1 ? "graph" : "graphs"} ${data.graphs.slice(0, 4).join(", ")}` +
    `${data.graphs.length > 4 ? ` and ${data.graphs.length - 4} more` : ""}; ` +
    (data.steps ? `predicted, and measured over ${data.steps} steps` : "predicted; nothing was measured");
  for (const [name, text] of data.lines) $("lines").append(element("dt", name), element("dd", text.replaceAll(" -> ", " \u2192 ")));
  function add(id, head, rows) {  // a table that is there only if it has rows; a number is a cell flush right
    const body = element("tbody"), table = element("table");
    for (const row of rows) {
      const line = element("tr");
      line.append(...row.map(([text, number]) => element("td", text, { class: number ? "number" : "" })));
      body.append(line);
    }
    table.append(body);
    $(id).append(element("h2", head), table);
    $(id).hidden = !rows.length;
  }
  add("unfreed", `Not freed: ${bytes(data.missed)} of ${bytes(data.asked)} a step stay in memory beyond what the budget allows`,
    data.missed ? data.unfreed.map((each) => [[bytes(each.nbytes), true], [each.module], [each.source], [`held by ${each.who}`]]) : []);
  add("stalls", "The step waits for", data.stalls.map(({ module, source, seconds: [write, read, predicted] }) =>
    [[module || "(no module)"], [source], ...[["writes", write], ["reads", read], ...(data.steps ? [["predicted", predicted]] : [])]
      .map(([name, s]) => [`${name} ${time(1000 * s)}`, true])]));
  $("fold").checked = state.fold;
  $("scale").checked = state.scale;
  $("scale-label").hidden = !seen;
  $("scale-text").textContent = `Stretch measured times (\u00d7${+(1 / ratio).toPrecision(2)})`;
  $("details").textContent = "Click a bar or a row.";
  redraw();
  window.report = { chart, data, state, zoomed, lines: () => shown.length };
})();
