"""The realistic products with matrices of few bits: what checkpoints store, and the sizes of models."""

from dataclasses import dataclass, replace

from pallas_kernels.quantized_matmul.code import E4M3, E5M2, FLOAT4, INT8, UINT4, Code


@dataclass(frozen=True)
class QuantizedCase:
    """Rows [num_rows, size_in] times a matrix [size_out, size_in], whose elements are (code - zero) * scale.

    group: how many inputs of a row of the matrix have one scale, and one zero if there are zeros
    rounds_tokens: whether rows are rounded to the code as well, with a scale for each group
    """

    name: str
    code: Code
    group: int
    scale_dtype: str
    num_rows: int
    size_in: int
    size_out: int
    has_zeros: bool = False
    rounds_tokens: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def num_groups(self) -> int:
        """The groups of a row of the matrix."""
        return self.size_in // self.group

    @property
    def num_bytes(self) -> int:
        """The bytes of all codes, scales and zeros, which a product must read."""
        scale = {"float8_e8m0fnu": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}[self.scale_dtype]
        of_groups = self.num_groups * (scale + (1 if self.has_zeros else 0))
        return self.size_out * (self.size_in // self.code.per_byte + of_groups)


# Every kind of numbers and of scales, with zeros and without. Sizes end in the middle of whatever a kernel takes at a
# time, and one row, a few, and more than one tile of them are multiplied.
CASES = (
    QuantizedCase("int4", UINT4, 128, "bfloat16", 1, 256, 128),
    QuantizedCase("int4-groups-of-32", UINT4, 32, "bfloat16", 16, 128, 256),
    QuantizedCase("int4-zeros", UINT4, 64, "float16", 5, 192, 104, has_zeros=True),
    QuantizedCase("int8-groups", INT8, 32, "float32", 3, 96, 72),
    QuantizedCase("int8-zeros", INT8, 16, "bfloat16", 9, 80, 136, has_zeros=True),
    QuantizedCase("fp8-blocks", E4M3, 128, "float32", 16, 384, 128),
    QuantizedCase("e5m2", E5M2, 32, "float32", 2, 64, 48),
    QuantizedCase("mxfp4", FLOAT4, 32, "float8_e8m0fnu", 150, 160, 96),
    QuantizedCase("nvfp4", FLOAT4, 16, "float32", 4, 48, 40),
)

_QWEN3_8B = QuantizedCase("qwen3-8b-gate-up-int4-decode-1", UINT4, 128, "bfloat16", 1, 4096, 24576)

# What models make of steps, for compilers.
SERVING = (
    _QWEN3_8B,
    replace(_QWEN3_8B, name="qwen3-8b-gate-up-int4-decode-16", num_rows=16),
    replace(_QWEN3_8B, name="qwen3-8b-gate-up-int4-prefill-2048", num_rows=2048),
    replace(_QWEN3_8B, name="qwen3-8b-gate-up-int4-g32-decode-16", group=32, num_rows=16),
    replace(_QWEN3_8B, name="qwen3-8b-down-awq-decode-16", scale_dtype="float16", size_in=12288, size_out=4096,
            num_rows=16, has_zeros=True),
    QuantizedCase("qwen3-8b-gate-up-fp8-decode-16", E4M3, 128, "float32", 16, 4096, 24576),
    # DeepSeek V3's widest matrix, and rows with one scale, as tokens have then.
    QuantizedCase("deepseek-v3-gate-up-fp8-tokens-decode-16", E4M3, 128, "float32", 16, 7168, 36864,
                  rounds_tokens=True),
    QuantizedCase("deepseek-v3-gate-up-fp8-tokens-prefill-2048", E4M3, 128, "float32", 2048, 7168, 36864,
                  rounds_tokens=True),
    QuantizedCase("qwen3-8b-gate-up-fp8-tokens-prefill-2048", E4M3, 4096, "float32", 2048, 4096, 24576,
                  rounds_tokens=True),
    QuantizedCase("llama-3-70b-eighth-down-int8-decode-16", INT8, 128, "bfloat16", 16, 3584, 8192),
    QuantizedCase("gpt-oss-20b-expert-mxfp4-decode-4", FLOAT4, 32, "float8_e8m0fnu", 4, 2880, 5760),
    QuantizedCase("nvfp4-decode-16", FLOAT4, 16, "float8_e4m3fn", 16, 4096, 4096),
    QuantizedCase("nvfp4-prefill-2048", FLOAT4, 16, "float8_e4m3fn", 2048, 4096, 4096),
)  # fmt: skip
