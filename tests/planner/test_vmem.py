"""Arrays in a TPU's VMEM are found in the text of a program as libtpu 0.0.48.1 writes it."""

from jaxvllm.planner.vmem import largest_vmem_array

# From a scan that copies a layer's experts; `metadata` and `backend_config` are left out. S(2) and S(6) are other
# memories, and what the parameter and the last element of a tuple hold stays in HBM.
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
