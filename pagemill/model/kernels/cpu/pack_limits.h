// What integers of panels are multiplied with, and what is added, made of scales and zero points as files have them.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

// The nearest 16-bit float, in the low half of each lane. `held` becomes 0 where that is further off than 2^-11 of x.
PM_INLINE vu float_to_half(vf x, vi& held) {
  const vu sign = (vu)x >> 16 & 0x8000u, bits = (vu)x & 0x7fffffffu;
  const vf magnitude = (vf)bits;
  const vu usual = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
  // Below 2^-14 they are multiples of 2^-24, as float32 from 0.5 on: an addition rounds to one.
  const vu small = (vu)(magnitude + splat(0.5f)) - 0x3f000000u;
  const vu half = (vu)select((vi)(magnitude < splat(0x1p-14f)), (vf)small, (vf)usual);
  const vf error = (vf)((vu)(half_to_float(half) - magnitude) & 0x7fffffffu);
  held &= (vi)(error <= magnitude * splat(0x1p-11f)) & (vi)(half < 0x7c00u);
  return half | sign;
}

// Of a row, from a column on that is a multiple of LANES; those of the first `count` lanes.
PM_INLINE vf zero_points(const LimitArgs& args, int64_t row, int64_t col, int64_t count) {
  vu found = {};
  if (args.of_rows) {
    const int64_t output = args.first + row;
    memcpy(&found, args.zeros + output / OCTET * args.zeros_stride + col, count * 4);
    found >>= args.shifts[output % OCTET];
  } else {
    const uint32_t* words = args.zeros + row * args.zeros_stride + col / OCTET;
    found += words[0];
    if (count > OCTET) found = (vu)select(lane_index() < (int)OCTET, (vf)found, (vf)(vu{} + words[1]));
    found >>= load_raw<vu>(args.shifts + col % OCTET);
  }
  return __builtin_convertvector((vi)((found + args.added) & 15u), vf);
}

template <class T>
bool pack_limits_of(const LimitArgs& args) {
  vi held = ~vi{};
  for (int64_t row = 0; row < args.rows; ++row) {
    const T* scales = (const T*)args.scales + row * args.stride;
    for_vectors(args.cols, [&](int64_t col, int64_t count) {
      const vf exact = load(scales + col, count) * splat(args.unit);
      const vu scale = float_to_half(exact, held);
      if (args.zeros) {
        const vu both = scale | float_to_half(exact * -zero_points(args, row, col, count), held) << 16;
        memcpy((uint32_t*)args.out + row * args.cols + col, &both, count * 4);
      } else {
        const vh halves = narrow_bits(scale);
        memcpy((uint16_t*)args.out + row * args.cols + col, &halves, count * 2);
      }
    });
  }
  for (int i = 0; i < LANES; ++i)
    if (!held[i]) return false;
  return true;
}

bool pack_limits(const LimitArgs& args) {
  if (args.dtype == PM_FLOAT16) return pack_limits_of<fp16>(args);
  if (args.dtype == PM_BFLOAT16) return pack_limits_of<bf16>(args);
  return pack_limits_of<float>(args);
}

}  // namespace
