// The kernels for the baseline of the architecture; the build passes the flags of this instruction set.
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "pack_limits.h"
#include "pack_linear.h"
#include "rows.h"
#include "sample.h"
#include "streams.h"
#include "write_kv.h"

const KernelTable kernels_portable = {
    "portable", norm, activation, activate, add, scale, soft_cap, multiply, sum_rows, streams, route, clamp, weigh,
    rope, argmax, sample, linear, quantized_bytes, quantize_rows, pack_linear, pack_limits, write_kv,
    attention_scratch_bytes, attend, attend_segment, merge_segments,
};
