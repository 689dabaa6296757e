"""Inductor's CUDA code, generated on a machine without a GPU, with plain Inductor's beside ours.

python -m tests.cuda_codegen                  # the table of all cases
python -m tests.cuda_codegen "GPT, 1 layer"   # of one
python -m tests.cuda_codegen --code DIR       # and the generated code

Nothing runs: what is seen is the order of the calls, how long each buffer lives, device guards and what Inductor
knows of alignment; no value and no time. Attention has its math form, or calls the flash kernels by their names.

    models      the cases
    generate    in a process of its own: pretends a device, lowers the cases, counts, prints JSON
    pretend     what PyTorch's CPU build must be told for that, beside guard.cpp
    code        what is counted in the code
    process     starts it; `__main__` prints the table
"""
