"""Inductor's CUDA code, run with values on a machine without a GPU, and as late as CUDA permits.

python -m pytest tests/cuda_values -m ""      # needs the extra `cuda-interpreter`, which installs Triton

PyTorch lowers training steps for a pretended device, as in `tests.cuda_codegen`. Then the generated wrappers run:
kernels in Triton's interpreter, library calls as those of the CPU, our operators in our runtime. All of it is queued
on a fake device (`tests.runtime.fake_gpu`), which does its work in six orders. docs/gpu.md has what that shows.

    cases        what is trained
    step         captures both graphs of a model, and trains with them
    cuda_names   maps what the generated code calls
    interpreter  what Triton's interpreter lacks
    late_gpu     the device
    engines      the engines that store; staged: the driver for engine posix
    plants       faults that must be found
    run          in a process of its own: trains, compares, prints JSON; results, process: there and back
"""
