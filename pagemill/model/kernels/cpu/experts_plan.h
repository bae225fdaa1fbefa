// Which rows go to which experts in a step, and what they give on the way: memory, and shares of the work. Who does what,
// layer_plan.cpp says. Compiled for the baseline.
#pragma once

#include <string.h>

#include <algorithm>

#include "plan_rows.h"

namespace {

// Rows that go through the experts of a layer at a time, so that what they give on the way needs no more memory.
constexpr int64_t EXPERT_ROWS = 1024;
// Up to so many choices each thread sorts for itself: that is sooner done than waited for.
constexpr int64_t MAX_OWN_CHOICES = 256;

// Choices of rows, a place for each, sorted by expert.
struct ExpertPlaces {
  int32_t* choice;    // [places]: row * top_k + which of its choices
  int32_t* position;  // [choices]: the place of each; negative: the expert is not here
  int32_t* start;     // [experts + 1]: the first place of each expert
  int32_t* used;      // those that have places
  int32_t* num_used;
};

class ExpertRows {
 public:
  // False: out of memory.
  bool prepare(const PmOp* ops, int64_t num_ops, const PmRun& run, int64_t threads) {
    const int64_t rows = std::min(run.num_tokens, EXPERT_ROWS);
    int64_t inner = 0, parts = 0, numbers = 0;
    for (int64_t i = 0; i < num_ops; ++i) {
      if (ops[i].kind != PM_OP_EXPERTS) continue;
      const PmExperts& experts = *ops[i].experts;
      const int64_t choices = rows * experts.top_k;
      inner = std::max(inner, choices * experts.inner * (experts.clamped ? 2 : 1));
      parts = std::max(parts, choices * run.widths[ops[i].out]);
      numbers = std::max(numbers, 2 * choices + 2 * experts.count + 2);
      any_ = true;
    }
    if (!any_) return true;
    numbers_stride_ = (numbers + 15) / 16 * 16;
    numbers_ = (int32_t*)numbers_memory.reserve(numbers_stride_ * threads * (int64_t)sizeof(int32_t));
    inner_ = (element*)inner_memory.reserve(inner * (int64_t)sizeof(element));
    parts_ = (element*)parts_memory.reserve(parts * (int64_t)sizeof(element));
    return numbers_ && inner_ && parts_;
  }

  bool any() const { return any_; }

  // In the memory of a thread.
  ExpertPlaces places(const PmExperts& experts, int64_t rows, int64_t rank) const {
    const int64_t choices = rows * experts.top_k, count = experts.count;
    int32_t* at = numbers_ + rank * numbers_stride_;
    return {at, at + choices, at + 2 * choices, at + 2 * choices + count + 1, at + 2 * choices + 2 * count + 1};
  }

  static void sort(const PmExperts& experts, const float* routed, int64_t rows, const ExpertPlaces& places) {
    const int64_t top_k = experts.top_k, count = experts.count;
    const auto each = [&](auto body) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < top_k; ++k) {
          const int64_t expert = ((const int32_t*)routed)[r * 2 * top_k + k] - experts.first;
          body(r * top_k + k, expert >= 0 && expert < count ? expert : -1);
        }
    };
    int32_t* start = places.start;
    std::fill(start, start + count + 1, 0);
    each([&](int64_t, int64_t expert) {
      if (expert >= 0) ++start[expert + 1];
    });
    *places.num_used = 0;
    for (int64_t e = 0; e < count; ++e) {
      if (start[e + 1]) places.used[(*places.num_used)++] = (int32_t)e;
      start[e + 1] += start[e];
    }
    each([&](int64_t choice, int64_t expert) {
      places.position[choice] = expert < 0 ? -1 : start[expert]++;
      if (expert >= 0) places.choice[places.position[choice]] = (int32_t)choice;
    });
    for (int64_t e = count; e > 0; --e) start[e] = start[e - 1];  // each was moved to where the next one begins
    start[0] = 0;
  }

  // Of an expert's first layer: its rows of x, gathered where they are several, or weighted.
  LinearArgs up_args(const PmExperts& experts, const ExpertPlaces& places, int64_t expert, const element* x,
                     const float* routed, int64_t width) const {
    static thread_local ThreadBuffer gathered;
    const int64_t first = places.start[expert], rows = places.start[expert + 1] - first, top_k = experts.top_k;
    const auto row_of = [&](int64_t i) { return x + places.choice[first + i] / top_k * width; };
    const element* from = row_of(0);
    if (rows > 1 || experts.weighs_inputs) {
      element* to = (element*)gathered.at_least(rows * width * (int64_t)sizeof(element));
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t choice = places.choice[first + i];
        if (experts.weighs_inputs)
          selected->scale({to + i * width, row_of(i), nullptr, PM_BFLOAT16, PM_NO_ACTIVATION,
                           routed[choice / top_k * 2 * top_k + top_k + choice % top_k]}, 0, width);
        else
          memcpy(to + i * width, row_of(i), width * sizeof(element));
      }
      from = to;
    }
    const int64_t given = up_width(experts);
    return {experts.gate_up[expert], from, inner_ + first * given, rows, width, given, PM_BFLOAT16};
  }

  // Of the layer back, which reads what the first one gave. A clamped gate is computed by each thread that has to do with
  // the expert: that is sooner done than waited for.
  LinearArgs down_args(const PmExperts& experts, const ExpertPlaces& places, int64_t expert, int64_t width) const {
    const int64_t first = places.start[expert], rows = places.start[expert + 1] - first;
    const element* from = inner_ + first * up_width(experts);
    if (experts.clamped) {
      static thread_local ThreadBuffer gated;
      element* to = (element*)gated.at_least(rows * experts.inner * (int64_t)sizeof(element));
      selected->clamp({to, from, experts.inner, (float)experts.alpha, (float)experts.limit}, 0, rows);
      from = to;
    }
    return {experts.down[expert], from, parts_ + first * width, rows, experts.inner, width, PM_BFLOAT16};
  }

  // Columns [begin, end) of the sum of a row; experts are added in their order.
  void weigh(const PmExperts& experts, const ExpertPlaces& places, const float* routed, int64_t row, element* out,
             int64_t width, Share columns) const {
    static thread_local ThreadBuffer memory;
    const int64_t top_k = experts.top_k;
    float* weights = (float*)memory.at_least(2 * top_k * (int64_t)sizeof(float));
    int32_t* positions = (int32_t*)(weights + top_k);
    const float* given = routed + row * 2 * top_k + top_k;
    int64_t count = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t position = places.position[row * top_k + k];
      if (position < 0) continue;
      int64_t at = count++;
      for (; at > 0 && positions[at - 1] > position; --at) {
        positions[at] = positions[at - 1];
        weights[at] = weights[at - 1];
      }
      positions[at] = position;
      weights[at] = experts.weighs_inputs ? 1.0f : given[k];
    }
    selected->weigh({out, parts_, positions, weights, count, width}, columns.begin, columns.end);
  }

 private:
  // Elements that the first layer of an expert gives.
  static int64_t up_width(const PmExperts& experts) { return experts.clamped ? 2 * experts.inner : experts.inner; }

  static thread_local ThreadBuffer numbers_memory, inner_memory, parts_memory;
  bool any_ = false;
  int32_t* numbers_ = nullptr;
  int64_t numbers_stride_ = 0;
  element *inner_ = nullptr, *parts_ = nullptr;
};

thread_local ThreadBuffer ExpertRows::numbers_memory, ExpertRows::inner_memory, ExpertRows::parts_memory;

}  // namespace
