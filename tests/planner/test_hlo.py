"""HLO text is read: collectives in loops, branches, pairs and what is wrapped, arrays in VMEM, and a real program."""

import pytest

from jaxvllm.planner.hlo import Collective, UnreadableHlo, largest_vmem_array, read_collectives

# As XLA:GPU and XLA:TPU write it, shortened: a loop that tells its length and one that compares with a constant, one
# within the other; both forms of branches; pairs; what a fusion and a call on another core wrap; tuples.
PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %add.1 = f32[] add(%x, %x)
}

%wrapped (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-reduce.4 = bf16[4,8]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=1, to_apply=%add
}, execution_thread="sparsecore"

%inner_condition (s: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5), metadata={op_name="all-reduce(not one)"}
  %s = (s32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%inner_body (s.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %s.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %reduced = bf16[4,8]{1,0} fusion(%s.1), kind=kCustom, calls=%wrapped
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%s.1, %reduced)
}

%outer_body (s.2: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %s.2 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%s.2), channel_id=1, to_apply=%add
  %done = bf16[4,8]{1,0} all-reduce-done(%start)
  ROOT %loop = (s32[], bf16[4,8]{1,0}) while(%s.2), condition=%inner_condition, body=%inner_body
}

%outer_condition (s.3: (s32[], bf16[4,8])) -> pred[] {
  %s.3 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %anything = pred[] custom-call(%s.3), custom_call_target="x"
}

%greedy (g: f32[8]) -> f32[8] {
  ROOT %g = f32[8]{0} parameter(0)
}

%draws (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  %parts = (f32[2,4]{1,0}, /*index=1*/f32[2,4]{1,0}) all-to-all(%d, %d), channel_id=2
  ROOT %same = f32[8]{0} get-tuple-element(%parts), index=0
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %layers = (s32[], bf16[4,8]{1,0}) while(%a), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"},"x":"0"}
  %call-start = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%wrapped
  %call-done = bf16[4,8]{1,0} call-done(%call-start), to_apply=%wrapped
  %both = bf16[4,8]{1,0} custom-call(%call-done), custom_call_target="x", called_computations={%add, %wrapped}
  %sampled = f32[8]{0} conditional(%a, %a, %a), branch_computations={%greedy, %draws}
  %logprobs = f32[8]{0} conditional(%a, %a, %a), true_computation=%draws, false_computation=%greedy
  %packed = s4[6]{0} all-gather(%a), dimensions={0}
  %room = bf16[64,8]{1,0} broadcast(%a), dimensions={}
  %wanted = bf16[64,8]{1,0} ragged-all-to-all(%logprobs, %room, %a, %a, %a, /*index=5*/%a), channel_id=3, replica_groups={{0,1}}
  %back = f32[8]{0} ragged-all-to-all(%room, %logprobs, %a, %a, %a, /*index=5*/%a), channel_id=3, replica_groups={{0,1}}
  %tokens-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%a), replica_groups=mesh['data'=2,'model'=4] {'data'}
  %tokens = f32[16]{0} all-gather-done(%tokens-start)
  ROOT %out = pred[4,2]{1,0} reduce-scatter(%a), dimensions={0}, to_apply=%add
}
"""  # noqa: E501


def test_everything_counts_as_often_as_it_runs():
    assert read_collectives(PROGRAM) == (
        # 3 pairs in the outer loop, 3 x 5 fused in the inner one, 1 on the other core, 1 in the second of two called.
        Collective("all-reduce", 20, 64, conditional=False),
        Collective("all-gather", 1, 64, conditional=False, over="data"),  # of a pair the start tells who takes part
        # What one device sends and what the other one gets back, and not the rooms for the worst case.
        Collective("ragged-all-to-all", 2, 32, conditional=False, over="all"),
        Collective("reduce-scatter", 1, 8, conditional=False),
        Collective("all-gather", 1, 3, conditional=False),
        Collective("all-to-all", 2, 64, conditional=True),
    )


def test_a_loop_that_does_not_tell_its_length_is_an_error():
    assert '"known_trip_count"' in PROGRAM
    with pytest.raises(UnreadableHlo, match="the loop layers has collectives, .* how often it runs"):
        read_collectives(PROGRAM.replace("known_trip_count", "unknown_trip_count"))


def test_a_loop_without_collectives_need_not_tell():
    quiet = "\n".join(line for line in PROGRAM.splitlines() if "all-reduce" not in line and "%reduced" not in line)
    assert [each.kind for each in read_collectives(quiet.replace("known_trip_count", "x"))] == [
        "all-gather",
        "ragged-all-to-all",
        "reduce-scatter",
        "all-gather",
        "all-to-all",
    ]


def test_what_is_no_hlo_is_refused():
    with pytest.raises(UnreadableHlo, match="no ENTRY"):
        read_collectives("module @jit_step {\n}")


@pytest.mark.parametrize(
    ("kind", "sent"),
    # A ring of 4, results of 12 bytes: 3 of 4 parts are passed on, by an all-reduce twice; what is scattered is a part.
    [("all-reduce", 18), ("all-gather", 9), ("all-to-all", 9), ("reduce-scatter", 36), ("collective-permute", 12)],
)
def test_bytes_sent_round_a_ring(kind, sent):
    assert Collective(kind, 1, 12, False).bytes_sent(4) == sent
    assert Collective(kind, 5, 12, False).bytes_sent(4) == 5 * sent


# As libtpu 0.0.48.1 writes it, from a scan that copies a layer's experts; `metadata` and `backend_config` are left out.
# S(2) and S(6) are other memories, and what the parameter and the last element of a tuple hold stays in HBM.
COPYING = """
  %p.1 = bf16[4,8,2048,2048]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %metadata = (s32[9]{0:T(128)S(1)}, s32[1024]{0:T(128)}) custom-call(%p.2), custom_call_target="tpu_custom_call"
  %fusion.2 = bf16[8,2048,2048]{2,1,0:T(8,128)(2,1)S(1)} fusion(%p.1, %copy.2), kind=kLoop, calls=%fused
  %copy-start = (f32[16,2048]{1,0:T(8,128)S(1)}, f32[16,2048]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p.3)
  %index = s32[]{:T(128)S(6)} copy(%p.4)
"""


def test_the_largest_array_in_vmem() -> None:
    assert largest_vmem_array(COPYING) == (8 * 2048 * 2048 * 2, "bf16[8,2048,2048]")
    without = "\n".join(line for line in COPYING.splitlines() if "fusion" not in line)
    assert largest_vmem_array(without) == (16 * 2048 * 4, "f32[16,2048]")


def test_a_program_with_nothing_in_vmem() -> None:
    assert largest_vmem_array("  %p.1 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)\n") == (0, "")
