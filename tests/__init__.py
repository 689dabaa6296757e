import os

# Workers of pytest-xdist share the cores, and a thread that waits for others spins. Two workers of two threads on two
# cores took four times as long to train a GPT of two layers as two workers of one. It is said before torch is imported,
# so that a kernel has as many threads, and sums in the same order, whichever thread of a test calls it.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _WORKERS)))
