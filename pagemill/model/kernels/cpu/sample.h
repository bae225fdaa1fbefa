// One draw per row of logits: temperature, min-p, top-k, top-p, and the token at which the cumulative weight passes a
// given uniform number. Knows nothing about where that number comes from.
//
// No sort of the row: the least kept weight is found through a histogram of the weights' leading bits, then one of the
// next bits of those in its bin, and only what is left is sorted. Weights that are too small to matter by a cheap bound
// are left out at once. Weights are exp((x - max) / temperature), so the largest is 1.
#pragma once

#include "kernels.h"
#include "logits_row.h"
#include "thread_buffer.h"
#include "vec_math.h"

namespace {

constexpr int SAMPLE_BIN_SHIFT = 20;  // eight bins for each power of two; the bin of 1 is the highest
constexpr int SAMPLE_FINE_SHIFT = 10;  // and as many again in each of them
constexpr int64_t SAMPLE_BINS = 1024;
constexpr int64_t SAMPLE_STRETCH = 128;
constexpr int64_t SAMPLE_FEW = 64;  // are sorted as they are

// How many weights, and what they sum to.
struct Amount {
  int64_t count;
  double mass;

  PM_INLINE bool reaches(const Amount& limit) const { return count >= limit.count || mass >= limit.mass; }
  PM_INLINE Amount with(const Amount& other) const { return {count + other.count, mass + other.mass}; }
};

PM_INLINE int64_t bin_of(float weight, int shift) {
  int32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return (bits >> shift) & (SAMPLE_BINS - 1);
}

struct WeightHistogram {
  Amount bins[SAMPLE_BINS];

  void fill(const float* weights, int64_t count, int shift) {
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < count; ++i) {
      Amount& bin = bins[bin_of(weights[i], shift)];
      bin = bin.with({1, weights[i]});
    }
  }

  // The bin in which the largest weights reach `limit`, or -1; `above` grows by what lies in higher ones.
  int64_t reach(const Amount& limit, Amount& above) const {
    for (int64_t bin = SAMPLE_BINS - 1; bin >= 0; --bin) {
      if (!bins[bin].count) continue;
      if (above.with(bins[bin]).reaches(limit)) return bin;
      above = above.with(bins[bin]);
    }
    return -1;
  }
};

// NaN if there is one in the row.
template <class Row>
float largest_of(const Row& row, int64_t cols) {
  vf highest = splat(-__builtin_inff());
  vi unordered = {};
  float found = -__builtin_inff(), num_nan = 0.0f;
  for (int64_t begin = 0; begin < cols; begin += SAMPLE_STRETCH) {
    const int64_t end = min_of(cols, begin + SAMPLE_STRETCH);
    if (row.refuses_all(begin, end)) continue;
    int64_t d = begin;
    for (; d + LANES <= end; d += LANES) {
      const vf v = row.lanes(d);
      unordered |= v != v;
      highest = max_of(v, highest);
    }
    for (; d < end; ++d) {
      const float v = row.one(d);
      num_nan += v != v ? 1.0f : 0.0f;
      found = v > found ? v : found;
    }
  }
  const float top = max_lanes(highest);
  num_nan += sum_lanes(select(unordered, splat(1.0f), vf{}));
  return num_nan > 0 ? __builtin_nanf("") : top > found ? top : found;
}

// Weights of a row; those below `least` are 0. The largest of each stretch goes to `maxima`; returns their sum.
template <class Row>
double weigh(const Row& row, int64_t cols, float highest, float inverse, float least, float* weights, float* maxima) {
  double mass = 0.0;
  for (int64_t begin = 0; begin < cols; begin += SAMPLE_STRETCH) {
    const int64_t end = min_of(cols, begin + SAMPLE_STRETCH);
    if (row.refuses_all(begin, end)) {
      memset(weights + begin, 0, (end - begin) * sizeof *weights);
      maxima[begin / SAMPLE_STRETCH] = 0.0f;
      continue;
    }
    vf top = {}, partial = {};
    int64_t d = begin;
    for (; d + LANES <= end; d += LANES) {
      const vf all = exp_of((row.lanes(d) - highest) * inverse);
      const vf w = select(all < splat(least), vf{}, all);
      store(weights + d, w);
      top = max_of(w, top);
      partial += w;
    }
    float found = max_lanes(top), sum = sum_lanes(partial);
    for (; d < end; ++d) {
      const float w = exp_of((row.one(d) - highest) * inverse);
      weights[d] = w < least ? 0.0f : w;
      found = weights[d] > found ? weights[d] : found;
      sum += weights[d];
    }
    maxima[begin / SAMPLE_STRETCH] = found;
    mass += sum;
  }
  return mass;
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

// Those of a bin, to `members`, which may be `weights`; how many.
inline int64_t members_of(const float* weights, int64_t count, int64_t bin, int shift, float* members) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float weight = weights[i];
    members[found] = weight;
    found += bin_of(weight, shift) == bin;
  }
  return found;
}

// What top-k and top-p choose from: `count` weights above 0, in any order, and room for as many.
struct Candidates {
  const float* weights;
  int64_t count;
  float* room;
};

// The least of the largest weights that reach `limit`, and what they amount to. 0 when all together do not.
inline float least_to_reach(const Candidates& from, const WeightHistogram& bins, const Amount& limit, Amount& kept) {
  static thread_local WeightHistogram fine;
  kept = {};
  const int64_t bin = bins.reach(limit, kept);
  if (bin < 0) return 0.0f;
  float* members = from.room;
  int64_t count = members_of(from.weights, from.count, bin, SAMPLE_BIN_SHIFT, members);
  if (count > SAMPLE_FEW) {
    fine.fill(members, count, SAMPLE_FINE_SHIFT);
    Amount above = kept;
    const int64_t part = fine.reach(limit, above);
    if (part >= 0) {  // or it falls short by a rounding
      kept = above;
      count = members_of(members, count, part, SAMPLE_FINE_SHIFT, members);
    }
  }
  sort_down(members, count);
  int64_t last = 0;
  for (int64_t i = 0; i < count && !kept.reaches(limit); ++i) {
    kept = kept.with({1, members[i]});
    last = i;
  }
  return members[last];
}

// `k` stretches have a weight that is not below this, so the k-th largest is not. `room`: for as many as `maxima`.
inline float floor_of_count(const float* maxima, int64_t num_stretches, int64_t k, float* room) {
  if (k > num_stretches) return 0.0f;
  memcpy(room, maxima, num_stretches * sizeof *room);
  sort_down(room, num_stretches);
  return room[k - 1];
}

// Weights above 0 that are not below `floor`, to `found`; how many.
inline int64_t weights_from(float floor, const float* weights, int64_t cols, const float* maxima, float* found) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < cols; begin += SAMPLE_STRETCH) {
    if (maxima[begin / SAMPLE_STRETCH] < floor) continue;
    for (int64_t d = begin; d < min_of(cols, begin + SAMPLE_STRETCH); ++d) {
      const float weight = weights[d];
      found[count] = weight;
      count += weight > 0.0f && !(weight < floor);
    }
  }
  return count;
}

// Weights below this are not kept. `mass`: of all; `maxima`: of each stretch; `room`: for twice as many as weights.
inline float least_kept(const float* weights, int64_t cols, int64_t top_k, float top_p, double mass,
                        const float* maxima, float* room) {
  static thread_local WeightHistogram bins;
  const double all = __builtin_inf();
  const bool limited = top_k > 0 && top_k < cols;
  if (!limited && top_p >= 1.0f) return 0.0f;
  // Weights that together are less than what top-p leaves out are left out, whichever they are.
  const double left_out = (1.0 - top_p) * mass * (1.0 - 1e-5);
  const float floor = limited ? floor_of_count(maxima, ceil_div(cols, SAMPLE_STRETCH), top_k, room)
                              : (float)(left_out / (double)cols);
  const Candidates candidates = {room, weights_from(floor, weights, cols, maxima, room), room + cols};
  bins.fill(candidates.weights, candidates.count, SAMPLE_BIN_SHIFT);
  Amount kept = {};
  float least = 0.0f;
  if (limited) {
    least = least_to_reach(candidates, bins, {top_k, all}, kept);
    mass = kept.mass;
  }
  if (top_p >= 1.0f) return least;
  const float nucleus = least_to_reach(candidates, bins, {cols + 1, (double)top_p * mass}, kept);
  return nucleus > least ? nucleus : least;
}

// The first token at which the cumulative weight passes `uniform` times the whole; weights below `least` count as 0.
inline int64_t passing(const float* weights, int64_t cols, float least, double uniform, double* sums) {
  double whole = 0.0;
  const int64_t num_stretches = ceil_div(cols, SAMPLE_STRETCH);
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

// Room for one row.
struct SampleRoom {
  double* sums;
  float *weights, *maxima, *room;
};

template <class Row>
int32_t draw(const SampleArgs& args, int64_t r, const Row& row, const SampleRoom& at) {
  const float highest = largest_of(row, args.cols);
  if (!is_finite(highest)) return (int32_t)NO_TOKEN;
  const double mass = weigh(row, args.cols, highest, 1.0f / args.temperature[r], args.min_p[r], at.weights, at.maxima);
  const float least = least_kept(at.weights, args.cols, args.top_k[r], args.top_p[r], mass, at.maxima, at.room);
  return (int32_t)passing(at.weights, args.cols, least, args.uniforms[r], at.sums);
}

void sample(const SampleArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer buffer;
  const int64_t cols = args.cols, num_stretches = ceil_div(cols, SAMPLE_STRETCH);
  const int64_t num_floats = 3 * cols + num_stretches;
  double* sums = (double*)buffer.at_least(num_stretches * (int64_t)sizeof(double) + num_floats * (int64_t)sizeof(float));
  float *weights = (float*)(sums + num_stretches), *maxima = weights + cols;
  const SampleRoom at = {sums, weights, maxima, maxima + num_stretches};
  for (int64_t r = begin; r < end; ++r) {
    const float* logits = args.logits + r * args.stride;
    const uint32_t* words = args.masks ? args.masks[r] : nullptr;
    args.out[r] = words ? draw(args, r, MaskedRow{logits, words}, at) : draw(args, r, WholeRow<float>{logits}, at);
  }
}

}  // namespace
