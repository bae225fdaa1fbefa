// A mixture of experts: the choice of a router, and the sum of what experts give. Arithmetic is float32.
#pragma once

#include "rows.h"
#include "thread_buffer.h"

namespace {

constexpr float NOT_CHOSEN = -__builtin_inff();

// The first of the best of so many scores.
PM_INLINE int64_t best_of(const float* scores, int64_t count) { return argmax_of(WholeRow<float>{scores}, 0, count).index; }

void scores_of(const PmRouting& routing, const float* logits, float* scores) {
  const int64_t count = routing.num_experts;
  if (routing.sigmoid) {
    for_vectors(count, [&](int64_t i, int64_t n) { store(scores + i, 1.0f / (1.0f + exp_of(-load(logits + i, n))), n); });
    return;
  }
  const vf highest = splat(logits[best_of(logits, count)]);
  float sum = 0;
  for_vectors(count, [&](int64_t i, int64_t n) { store(scores + i, exp_of(load(logits + i, n) - highest), n); });
  for (int64_t i = 0; i < count; ++i) sum += scores[i];
  for_vectors(count, [&](int64_t i, int64_t n) { store(scores + i, load(scores + i, n) / splat(sum), n); });
}

// A group is as good as its best expert, or its best two together.
float quality_of(const float* scores, int64_t count, bool by_two) {
  float best = NOT_CHOSEN, second = NOT_CHOSEN;
  for (int64_t i = 0; i < count; ++i) {
    const float score = scores[i];
    second = score > best ? best : score > second ? score : second;
    best = score > best ? score : best;
  }
  return by_two && count > 1 ? best + second : best;
}

// What is to be chosen from is left in `choice`, and nothing of the groups that are not among the best.
void leave_best_groups(const PmRouting& routing, float* choice, float* quality) {
  const int64_t size = routing.num_experts / routing.num_groups;
  for (int64_t g = 0; g < routing.num_groups; ++g) quality[g] = quality_of(choice + g * size, size, routing.group_by_two);
  const float taken = __builtin_nanf("");
  for (int64_t i = 0; i < routing.top_groups; ++i) {
    int64_t best = -1;
    for (int64_t g = 0; g < routing.num_groups; ++g)
      if (quality[g] == quality[g] && (best < 0 || quality[g] > quality[best])) best = g;
    if (best >= 0) quality[best] = taken;
  }
  for (int64_t g = 0; g < routing.num_groups; ++g)
    for (int64_t i = 0; quality[g] == quality[g] && i < size; ++i) choice[g * size + i] = NOT_CHOSEN;
}

void route_row(const PmRouting& routing, const float* logits, int32_t* chosen, float* weights, float* memory) {
  const int64_t count = routing.num_experts;
  float *scores = memory, *choice = memory + count, *quality = choice + count;
  scores_of(routing, logits, scores);
  for (int64_t i = 0; i < count; ++i) choice[i] = routing.correction ? scores[i] + routing.correction[i] : scores[i];
  if (routing.num_groups > 1) leave_best_groups(routing, choice, quality);
  float sum = 0;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const int64_t best = best_of(choice, count);
    chosen[k] = (int32_t)best;
    weights[k] = scores[best];
    sum += scores[best];
    choice[best] = NOT_CHOSEN;
  }
  const float whole = routing.renormalize ? sum + 1e-20f : 1.0f;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    weights[k] = weights[k] / whole * (float)routing.scale;
    if (routing.factors) weights[k] *= routing.factors[chosen[k]];
  }
}

// Rows [begin, end).
void route(const RouteArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer memory;
  const PmRouting& routing = args.routing;
  float* own = (float*)memory.at_least((2 * routing.num_experts + routing.num_groups) * (int64_t)sizeof(float));
  for (int64_t r = begin; r < end; ++r) {
    float* routed = args.routed + r * 2 * routing.top_k;
    route_row(routing, args.logits + r * routing.num_experts, (int32_t*)routed, routed + routing.top_k, own);
  }
}

void clamp(const ClampArgs& args, int64_t begin, int64_t end) {
  const vf limit = splat(args.limit), alpha = splat(args.alpha);
  for (int64_t r = begin; r < end; ++r) {
    const bf16 *gates = (const bf16*)args.x + r * 2 * args.cols, *ups = gates + args.cols;
    bf16* out = (bf16*)args.out + r * args.cols;
    for_vectors(args.cols, [&](int64_t i, int64_t n) {
      vf gate = load(gates + i, n), up = load(ups + i, n);
      gate = select(gate > limit, limit, gate);  // NaN stays
      up = select(up > limit, limit, select(up < -limit, -limit, up));
      store(out + i, (up + 1.0f) * gate / (1.0f + exp_of(-gate * alpha)), n);
    });
  }
}

void weigh(const WeighArgs& args, int64_t begin, int64_t end) {
  const bf16* parts = (const bf16*)args.parts;
  bf16* out = (bf16*)args.out;
  for_vectors(end - begin, [&](int64_t i, int64_t n) {
    vf sum = {};
    for (int64_t k = 0; k < args.count; ++k)
      sum = fma(load(parts + args.positions[k] * args.cols + begin + i, n), splat(args.weights[k]), sum);
    store(out + begin + i, sum, n);
  });
}

}  // namespace
