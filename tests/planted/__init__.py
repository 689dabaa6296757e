"""Planted faults: 60 plausible mistakes in `passes/` and `runtime/`, and a runner that says which tests find each.

A test that no fault can fail proves nothing, and code that no test watches may break unseen. So each fault here is
planted in a copy of the checkout, and the default tests must fail there.

    python -m tests.planted --results docs/results/planted.jsonl     # all (make planted)
    python -m tests.planted --only a_name                            # one
    python -m tests.planted --table docs/results/planted.jsonl       # only print the table of these results
"""
