"""Why a test of PyTorch's ends otherwise under our partitioner: by suite and test. What is not here is a fault."""

from __future__ import annotations

from collections.abc import Iterator

FORM = "asserts the exact text of a graph, in which our nodes now stand"
COUNTS = "counts the nodes of both graphs, and ours are among them"
SAVED = "looks for the saved tensor among the forward's outputs, where its handle has taken its place"
DONATED = "asserts that the backward is donated nothing; it is donated the handle of what was to stay"
METADATA = "asserts `tensor_meta` on every node; ours have `val`, which is all that the compilers read"
PICKLE = "pickles the graph, which PyTorch does for its own operators only"

_BY_REASON = {
    "test_aotdispatch": {
        FORM: """
            TestAOTAutograd::test_buffer_batch_norm
            TestAOTAutograd::test_buffer_copied_in_graph
            TestAOTAutograd::test_buffer_copied_in_graph_with_different_shapes
            TestAOTAutograd::test_composite_impl_compile
            TestAOTAutograd::test_fw_bw_mutation_no_functionalization1
            TestAOTAutograd::test_input_mutation_storage_resize_down
            TestPartitioning::test_custom_partitioner_fn
            TestPartitioning::test_min_cut_partitioner_raise_getitems
        """,
        COUNTS: "TestAOTAutograd::test_compilation_context",
        DONATED: "TestAOTModuleSimplified::test_saved_tensors_hooks_donated_buffers",
        METADATA: "TestPartitioning::test_meta_tensor_inplace_op",
    },
    "test_activation_checkpointing": {
        FORM: "ActivationCheckpointingViaTagsTestsCPU::test_nonlocal_list_mutation_hidden_cpu",
        SAVED: "ActivationCheckpointingViaTagsTestsCPU::test_tags_must_save_tensor_that_has_backward_hook_cpu",
    },
    "test_regional_inductor": {
        FORM: "RegionalInductorInvokeSubgraphTests::test_repeated_blocks_serialize_False",
        PICKLE: """
            RegionalInductorTests::test_invoke_subgraph_inner_serialize_True
            RegionalInductorTests::test_invoke_subgraph_serialize_True
            RegionalInductorTests::test_max_autotune_no_cudagraphs_serialize_True
            RegionalInductorTests::test_repeated_blocks_serialize_True
            RegionalInductorTests::test_simple_serialize_True
        """,
    },
    "test_invoke_subgraph": {
        FORM: """
            TestInvokeSubgraphCompile::test_auto_functionalize
            TestInvokeSubgraphCompile::test_dedupe
            TestInvokeSubgraphCompile::test_different_strides_in_backward
            TestInvokeSubgraphCompile::test_dropout_checks_joint_graph
            TestInvokeSubgraphCompile::test_grad_accuracy_check
            TestInvokeSubgraphCompile::test_no_raise_on_reparameterize_module
        """,
    },
    "test_with_effects": {FORM: "TestWithEffects::test_regular_effectful_op_in_forward_and_backward"},
}


def _by_test(reasons: dict[str, str]) -> Iterator[tuple[str, str]]:
    for reason, tests in reasons.items():
        yield from ((test, reason) for test in tests.split())


EXPLAINED: dict[str, dict[str, str]] = {suite: dict(_by_test(reasons)) for suite, reasons in _BY_REASON.items()}
