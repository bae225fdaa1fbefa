// The kernels for AVX-512 with dot products of bytes and of bfloat16; the build passes the flags of this instruction set.
#if defined(__x86_64__)
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "pack_limits.h"
#include "pack_linear.h"
#include "rows.h"
#include "sample.h"
#include "streams.h"
#include "write_kv.h"

const KernelTable kernels_avx512_bf16 = {
    "avx512_bf16", norm, activation, activate, add, scale, soft_cap, multiply, sum_rows, streams, route, clamp, weigh,
    rope, argmax, sample, linear, quantized_bytes, quantize_rows, pack_linear, pack_limits, write_kv,
    attention_scratch_bytes, attend, attend_segment, merge_segments,
};
#endif
