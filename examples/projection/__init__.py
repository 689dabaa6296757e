"""What offloading needs and costs, by formulas: no model runs. docs/projection.md has every formula and its source."""
