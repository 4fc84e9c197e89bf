"""What the text of a program for a GPU tells of one run: kernels, waits of the host, and bytes."""

from benchmarks.states_gpu import COUNTED, Counted, Counter, StateStep

LAYER = COUNTED["qwen3-next"]

PROGRAM = """HloModule rows

%sliced (p: f32[100,8], i: s32[]) -> f32[1,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
}

%written (q: f32[100,8], x: f32[1,8], j: s32[]) -> f32[100,8] {
  %q = f32[100,8]{1,0} parameter(0)
  %x = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %all = f32[100,8]{1,0} dynamic-update-slice(%q, %x, %j, %none)
}

%compared (k: s32[]) -> pred[] {
  %k = s32[] parameter(0)
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%k, %four), direction=LT
}

%body (t: (s32[], f32[100,8])) -> (s32[], f32[100,8]) {
  %t = (s32[], f32[100,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %pages = f32[100,8]{1,0} get-tuple-element(%t), index=1
  %row = f32[1,8]{1,0} fusion(%pages, %n), kind=kLoop, calls=%sliced
  %after = f32[100,8]{1,0} fusion(%pages, %row, %n), kind=kLoop, calls=%written
  ROOT %next = (s32[], f32[100,8]{1,0}) tuple(%n, %after)
}

%condition (u: (s32[], f32[100,8])) -> pred[] {
  %u = (s32[], f32[100,8]{1,0}) parameter(0)
  %m = s32[] get-tuple-element(%u), index=0
  ROOT %goes_on = pred[] fusion(%m), kind=kLoop, calls=%compared
}

ENTRY %main (a: f32[100,8], b: s32[]) -> (s32[], f32[100,8]) {
  %a = f32[100,8]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %both = (s32[], f32[100,8]{1,0}) tuple(%b, %a)
  ROOT %loop = (s32[], f32[100,8]{1,0}) while(%both), condition=%condition, body=%body
}
"""


def test_slices_count_and_not_the_pages_that_they_are_of() -> None:
    read, written, compared = 32 + 4 + 32, 32 + 4 + 32, 4 + 1  # 100 rows of 32 bytes are no part of these
    counted = Counter(PROGRAM, LAYER, StateStep(rows=4, tokens=1), "tokens").count()
    assert counted == Counted(kernels=12, host_waits=4, num_bytes=4 * (read + written + compared))


def test_a_loop_whose_length_is_known_waits_for_nothing() -> None:
    known = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    counted = Counter(known, LAYER, StateStep(rows=4, tokens=1), "XLA").count()
    assert (counted.kernels, counted.host_waits) == (9, 0)


def test_our_kernel_touches_the_states_of_its_rows() -> None:
    pages = "f32[2,512,16,272,128]{4,3,2,1,0}"
    program = f"""HloModule kernel

ENTRY %main (a: f32[8], pages: f32[2,512,16,272,128]) -> (f32[4], f32[2,512,16,272,128]) {{
  %a = f32[8]{{0}} parameter(0)
  %pages = {pages} parameter(1)
  ROOT %taken = (f32[4]{{0}}, {pages}) custom-call(%a, %pages), custom_call_target="mosaic_gpu_v2"
}}
"""
    step = StateStep(rows=3, tokens=1)
    assert Counter(program, LAYER, step, "tokens").count() == Counted(
        kernels=1, num_bytes=32 + 16 + 6 * LAYER.state_bytes
    )
