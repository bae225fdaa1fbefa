// One draw per row of logits: temperature, min-p, top-k, top-p, and the token at which the cumulative weight passes a
// given uniform number. Knows nothing about where that number comes from.
//
// No sort of the row: the least kept weight is found through a histogram of the weights' leading bits, and only the bin
// that it lies in is sorted. Weights are exp((x - max) / temperature), so the largest is 1.
#pragma once

#include "kernels.h"
#include "thread_buffer.h"
#include "vec_math.h"

namespace {

constexpr int SAMPLE_BIN_SHIFT = 20;                                 // eight bins for each power of two
constexpr int64_t SAMPLE_BINS = (0x3f800000 >> SAMPLE_BIN_SHIFT) + 1;  // the last holds 1 alone
constexpr int64_t SAMPLE_STRETCH = 512;

struct WeightHistogram {
  int64_t count[SAMPLE_BINS];
  double sum[SAMPLE_BINS];
};

PM_INLINE int64_t bin_of(float weight) {
  int32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return bits >> SAMPLE_BIN_SHIFT;
}

PM_INLINE float largest_of(const float* row, int64_t cols) {
  vf highest = splat(-__builtin_inff());
  int64_t d = 0;
  for (; d + LANES <= cols; d += LANES) highest = max_of(load(row + d), highest);
  float found = max_lanes(highest);
  for (; d < cols; ++d) found = row[d] > found ? row[d] : found;
  return found;
}

// Weights of a row; those below `least` are 0.
PM_INLINE void weigh(const float* row, int64_t cols, float highest, float inverse, float least, float* weights) {
  int64_t d = 0;
  for (; d + LANES <= cols; d += LANES) {
    const vf w = exp_of((load(row + d) - highest) * inverse);
    store(weights + d, select(w < splat(least), vf{}, w));
  }
  for (; d < cols; ++d) {
    const float w = exp_of((row[d] - highest) * inverse);
    weights[d] = w < least ? 0.0f : w;
  }
}

// Shell's sort, largest first, by Ciura's gaps. The standard library's would be compiled once per instruction set under
// one name, and the linker would keep whichever it likes.
inline void sort_down(float* values, int64_t count) {
  static const int64_t gaps[] = {14347, 6376, 2834, 1260, 560, 249, 111, 49, 22, 10, 4, 1};
  for (int64_t gap : gaps)
    for (int64_t i = gap; i < count; ++i) {
      const float value = values[i];
      int64_t at = i;
      for (; at >= gap && values[at - gap] < value; at -= gap) values[at] = values[at - gap];
      values[at] = value;
    }
}

// The weights of one bin, largest first, to `members`; how many.
inline int64_t sorted_bin(const float* weights, int64_t cols, int64_t bin, float* members) {
  int64_t count = 0;
  for (int64_t d = 0; d < cols; ++d)
    if (weights[d] > 0.0f && bin_of(weights[d]) == bin) members[count++] = weights[d];
  sort_down(members, count);
  return count;
}

// The k-th largest weight; what the k largest sum to becomes `mass`. 0 when there are fewer than k above 0.
inline float kth_largest(const float* weights, int64_t cols, int64_t k, const WeightHistogram& bins, float* members,
                         double& mass) {
  int64_t above = 0;
  mass = 0.0;
  for (int64_t bin = SAMPLE_BINS - 1; bin >= 0; --bin) {
    if (above + bins.count[bin] < k) {
      above += bins.count[bin];
      mass += bins.sum[bin];
      continue;
    }
    sorted_bin(weights, cols, bin, members);
    for (int64_t i = 0; i < k - above; ++i) mass += members[i];
    return members[k - above - 1];
  }
  return 0.0f;
}

// The least weight of the smallest set of the largest ones that reaches `target`.
inline float least_of_mass(const float* weights, int64_t cols, double target, const WeightHistogram& bins,
                           float* members) {
  double before = 0.0;
  for (int64_t bin = SAMPLE_BINS - 1; bin >= 0; --bin) {
    if (!bins.count[bin]) continue;
    if (before + bins.sum[bin] < target) {
      before += bins.sum[bin];
      continue;
    }
    const int64_t count = sorted_bin(weights, cols, bin, members);
    float least = members[0];
    for (int64_t i = 0; i < count && before < target; ++i) {
      least = members[i];
      before += members[i];
    }
    return least;
  }
  return 0.0f;
}

inline float least_kept(const float* weights, int64_t cols, int64_t top_k, float top_p, float* members) {
  static thread_local WeightHistogram bins;
  memset(&bins, 0, sizeof bins);
  double mass = 0.0;
  for (int64_t d = 0; d < cols; ++d) {
    if (!(weights[d] > 0.0f)) continue;
    const int64_t bin = bin_of(weights[d]);
    ++bins.count[bin];
    bins.sum[bin] += weights[d];
  }
  for (int64_t bin = 0; bin < SAMPLE_BINS; ++bin) mass += bins.sum[bin];
  float least = 0.0f;
  if (top_k > 0 && top_k < cols) least = kth_largest(weights, cols, top_k, bins, members, mass);
  if (top_p >= 1.0f) return least;
  const float nucleus = least_of_mass(weights, cols, (double)top_p * mass, bins, members);
  return nucleus > least ? nucleus : least;
}

// The first token at which the cumulative weight passes `uniform` times the whole; weights below `least` count as 0.
inline int64_t passing(const float* weights, int64_t cols, float least, double uniform, double* sums) {
  double whole = 0.0;
  const int64_t num_stretches = (cols + SAMPLE_STRETCH - 1) / SAMPLE_STRETCH;
  for (int64_t s = 0; s < num_stretches; ++s) {
    const int64_t begin = s * SAMPLE_STRETCH, end = min_of(cols, begin + SAMPLE_STRETCH);
    vf partial = {};
    int64_t d = begin;
    for (; d + LANES <= end; d += LANES) {
      const vf w = load(weights + d);
      partial += select(w < splat(least), vf{}, w);
    }
    double sum = sum_lanes(partial);
    for (; d < end; ++d) sum += weights[d] < least ? 0.0 : weights[d];
    sums[s] = sum;
    whole += sum;
  }
  const double target = uniform * whole;
  double before = 0.0;
  int64_t last = cols - 1;
  for (int64_t s = 0; s < num_stretches; ++s) {
    if (before + sums[s] <= target) {
      before += sums[s];
      continue;
    }
    double cumulative = before;
    for (int64_t d = s * SAMPLE_STRETCH; d < min_of(cols, (s + 1) * SAMPLE_STRETCH); ++d) {
      if (weights[d] < least || !(weights[d] > 0.0f)) continue;
      cumulative += weights[d];
      last = d;
      if (cumulative > target) return d;
    }
    return last;  // the elements one by one sum to a little less than in lanes
  }
  for (int64_t d = cols - 1; d >= 0; --d)
    if (weights[d] > 0.0f && !(weights[d] < least)) return d;
  return cols - 1;
}

void sample(const SampleArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer buffer;
  const int64_t cols = args.cols, num_stretches = (cols + SAMPLE_STRETCH - 1) / SAMPLE_STRETCH;
  double* sums = (double*)buffer.at_least(num_stretches * (int64_t)sizeof(double) + 2 * cols * (int64_t)sizeof(float));
  float* weights = (float*)(sums + num_stretches);
  float* members = weights + cols;
  for (int64_t r = begin; r < end; ++r) {
    const float* row = args.logits + r * args.stride;
    weigh(row, cols, largest_of(row, cols), 1.0f / args.temperature[r], args.min_p[r], weights);
    float least = 0.0f;
    if (args.top_k[r] > 0 || args.top_p[r] < 1.0f)
      least = least_kept(weights, cols, args.top_k[r], args.top_p[r], members);
    args.out[r] = (int32_t)passing(weights, cols, least, args.uniforms[r], sums);
  }
}

}  // namespace
