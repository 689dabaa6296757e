"""The script of docs/tutorial.md: train a small GPT, see what was saved, look at the plan. Run it: it takes a minute.

`# --- NAME` begins a part. `python examples/excerpts.py --write` puts the parts and what they print into the page.
"""

# --- train
from typing import Any

import torch
from train_gpt import GPT, Shape, batches

import ssd_fx

OPTIONS: dict[str, Any] = {"dirs": ["."], "budget": 0.25}  # better: a directory on a fast drive

torch.manual_seed(0)
model = GPT(Shape(layers=2, width=128, heads=4, seq=256, dropout=0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
compiled = torch.compile(model, backend=ssd_fx.backend, options=OPTIONS)

for step, (inputs, targets) in zip(range(1, 11), batches(batch=8, seq=256, seed=0), strict=False):
    loss = compiled(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 10):
        print(f"step {step}: loss {loss.item():.1f}")
    if step == 5:
        ssd_fx.reset_stats()  # the first steps compile and learn

# --- stats
print(ssd_fx.stats())

# --- plan
(graph,) = ssd_fx.explain(model, options=OPTIONS)(inputs, targets).dumps
print(graph.table.splitlines()[0])
for group in graph.plan["groups"][2:10]:
    what = f"written behind {group['store']}" if group["decision"] == "offload" else group["reason"]
    print(f"{group['module']:24} {group['name']:10} {group['nbytes']:8} B  {group['decision']:8} {what}")
