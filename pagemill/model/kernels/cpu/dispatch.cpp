// Chooses the instruction set and exports the row-wise kernels. Compiled for the baseline of the architecture.
#include <cstring>
#include <new>

#include "kernels.h"
#include "parallel.h"
#include "selected.h"
#include "thread_buffer.h"

namespace {

struct Candidate {
  const KernelTable* table;
  bool (*supported)();
};

// Best first. __builtin_cpu_supports asks the operating system too whether it saves the wide registers.
const Candidate CANDIDATES[] = {
#if defined(__x86_64__)
    {&kernels_avx512_bf16,
     [] {
       return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
     }},
    {&kernels_avx512_vnni,
     [] {
       return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {&kernels_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {&kernels_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&kernels_portable, [] { return true; }},
};

int64_t bytes_of(int64_t dtype) { return dtype == PM_BFLOAT16 ? 2 : 4; }

}  // namespace

const KernelTable* selected = &kernels_portable;

namespace {

void norm_rows(const NormArgs& args, int64_t rows, int64_t threads) {
  share_evenly(rows, rows * args.cols * bytes_of(args.dtype) * (args.residual ? 4 : 2), threads,
               [&](int64_t begin, int64_t end) { selected->norm(args, begin, end); });
}

}  // namespace

int pm_init(const char* isa) {
  for (const Candidate& candidate : CANDIDATES) {
    if (isa && strcmp(isa, candidate.table->name) != 0) continue;
    if (!candidate.supported()) continue;
    selected = candidate.table;
    return 0;
  }
  return 1;
}

const char* pm_isa() { return selected->name; }

const void* pm_parallel_runtime() { return (const void*)&omp_get_thread_num; }

void pm_rms_norm(void* out, const void* x, void* residual, const void* weight, double eps, int64_t rows, int64_t cols,
                 int64_t inner, int64_t x_stride, int64_t dtype, int64_t weight_dtype, int64_t threads) {
  norm_rows({out, x, residual, residual, weight, cols, inner, x_stride, dtype, weight_dtype, (float)eps, 0, nullptr},
            rows, threads);
}

void pm_layer_norm(void* out, const void* x, void* residual, const void* weight, const void* bias, double eps,
                   int64_t rows, int64_t cols, int64_t inner, int64_t x_stride, int64_t dtype, int64_t threads) {
  norm_rows({out, x, residual, residual, weight, cols, inner, x_stride, dtype, dtype, (float)eps, 1, bias}, rows,
            threads);
}

void pm_activate(void* out, const void* x, int64_t count, int64_t dtype, int64_t activation, int64_t threads) {
  const ElementArgs args = {out, x, nullptr, dtype, activation, 0};
  share_evenly(count, count * bytes_of(dtype) * 2, threads,
               [&](int64_t begin, int64_t end) { selected->activate(args, begin, end); });
}

void pm_soft_cap(float* out, const float* x, int64_t count, double limit, int64_t threads) {
  const ElementArgs args = {out, x, nullptr, PM_FLOAT32, PM_NO_ACTIVATION, (float)limit};
  share_evenly(count, count * 32, threads, [&](int64_t begin, int64_t end) { selected->soft_cap(args, begin, end); });
}

void pm_sum_rows(float* sums, const void* x, const int64_t* starts, const int64_t* slots, int64_t requests,
                 int64_t cols, int64_t dtype, int64_t threads) {
  const SumArgs args = {sums, x, starts, slots, cols, dtype};
  const int64_t rows = requests ? starts[requests] - starts[0] : 0;
  share_evenly(requests, rows * cols * bytes_of(dtype), threads,
               [&](int64_t begin, int64_t end) { selected->sum_rows(args, begin, end); });
}

void pm_gated_activation(void* out, const void* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t dtype,
                         int64_t gelu, int64_t threads) {
  const ActivationArgs args = {out, x, cols, x_stride, dtype, gelu ? PM_GELU : PM_SILU};
  share_evenly(rows, rows * cols * bytes_of(dtype) * 3, threads,
               [&](int64_t begin, int64_t end) { selected->activation(args, begin, end); });
}

void pm_rope(void* x, const void* cos, const void* sin, int64_t tokens, int64_t num_heads, int64_t head_size,
             int64_t x_stride, int64_t dtype, int64_t half, int64_t table_stride, int64_t table_dtype,
             int64_t threads) {
  const RopeArgs args = {x, num_heads, head_size, x_stride, dtype, cos, sin, half, table_stride, table_dtype};
  share_evenly(tokens, tokens * num_heads * half * bytes_of(dtype) * 4, threads,
               [&](int64_t begin, int64_t end) { selected->rope(args, begin, end); });
}

// Work is shared by pieces of rows, so that one long row keeps all threads busy.
void pm_argmax(int64_t* out, const void* logits, int64_t rows, int64_t cols, int64_t stride, int64_t dtype,
               int64_t threads) {
  const ArgmaxArgs args = {logits, cols, stride, dtype, nullptr};
  constexpr int64_t MAX_PIECES = 64;
  const int64_t pieces = threads < 1 ? 1 : threads < MAX_PIECES ? threads : MAX_PIECES;
  if (rows > 1 || pieces == 1) {
    return share_evenly(rows, rows * cols * bytes_of(dtype), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) out[r] = token_of(selected->argmax(args, r, 0, cols));
    });
  }
  if (rows == 0) return;
  ArgmaxResult found[MAX_PIECES];
  share_evenly(pieces, cols * bytes_of(dtype), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      found[p] = selected->argmax(args, 0, cols * p / pieces, cols * (p + 1) / pieces);
  });
  ArgmaxResult best = found[0];
  for (int64_t p = 1; p < pieces; ++p) best = better_of(best, found[p]);
  out[0] = token_of(best);
}

void pm_sample(int32_t* out, const float* logits, const float* temperature, const float* min_p, const int32_t* top_k,
               const float* top_p, const double* uniforms, int64_t rows, int64_t cols, int64_t stride,
               int64_t threads) {
  const SampleArgs args = {out, logits, temperature, min_p, top_k, top_p, uniforms, cols, stride, nullptr};
  const bool few = rows * cols * (int64_t)sizeof(float) < MIN_PARALLEL_BYTES;
  if (threads <= 1 || rows == 1 || few) return selected->sample(args, 0, rows);
  WorkQueue queue(rows);  // some rows take many times as long as others
#pragma omp parallel num_threads((int)threads)
  queue.run([&](int64_t row) { selected->sample(args, row, row + 1); });
}

void pm_choose(int32_t* out, const float* logits, const uint8_t* greedy, const float* temperature, const float* min_p,
               const int32_t* top_k, const float* top_p, const double* uniforms, const uint32_t* const* masks,
               int64_t rows, int64_t cols, int64_t stride, int64_t threads) {
  const SampleArgs drawn = {out, logits, temperature, min_p, top_k, top_p, uniforms, cols, stride, masks};
  const ArgmaxArgs likeliest = {logits, cols, stride, PM_FLOAT32, masks};
  const auto choose = [&](int64_t row) {
    if (greedy[row])
      out[row] = (int32_t)token_of(selected->argmax(likeliest, row, 0, cols));
    else
      selected->sample(drawn, row, row + 1);
  };
  WorkQueue queue(rows);
  const bool few = rows * cols * (int64_t)sizeof(float) < MIN_PARALLEL_BYTES;
  if (threads <= 1 || rows == 1 || few) return queue.run(choose);
#pragma omp parallel num_threads((int)threads)
  queue.run(choose);
}

// Most words say the same of all their tokens: a quote may follow and little else, or any text.
void pm_mask(float* logits, const uint32_t* words, int64_t rows, int64_t cols, int64_t stride, int64_t words_stride,
             int64_t threads) {
  constexpr float REFUSED = -__builtin_inff();
  share_evenly(rows, rows * cols * (int64_t)sizeof(float), threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = logits + r * stride;
      const uint32_t* word = words + r * words_stride;
      for (int64_t at = 0; at < cols; at += MASK_BITS, ++word) {
        const int64_t count = cols - at < MASK_BITS ? cols - at : MASK_BITS;
        uint32_t refused = ~*word;
        if (count < MASK_BITS) refused &= (1u << count) - 1;
        if (refused == ~0u) {
          for (int64_t i = 0; i < MASK_BITS; ++i) row[at + i] = REFUSED;
          continue;
        }
        for (; refused; refused &= refused - 1) row[at + __builtin_ctz(refused)] = REFUSED;
      }
    }
  });
}

int64_t pm_panel() { return LINEAR_PANEL; }

void pm_linear(const PmLinear* linear, void* out, const void* x, int64_t num_rows, int64_t x_stride, int64_t out_stride,
               int64_t out_dtype, int64_t threads) {
  static thread_local ThreadBuffer quantized;
  LinearArgs args = {*linear, x, out, num_rows, x_stride, out_stride, out_dtype, nullptr};
  const int64_t bytes = selected->quantized_bytes(args);
  if (bytes) {
    args.quantized = quantized.at_least(bytes);
    share_evenly(num_rows, num_rows * linear->cols * 2, threads,
                 [&](int64_t begin, int64_t end) { selected->quantize_rows(args, begin, end); });
  }
  const int64_t panels = num_panels(*linear);
  if (threads <= 1 || panels * panel_bytes(*linear) < MIN_PARALLEL_BYTES) return selected->linear(args, 0, panels);
  static thread_local ThreadBuffer memory;
  auto* counters = (Shares::Counter*)memory.at_least(threads * (int64_t)sizeof(Shares::Counter));
  for (int64_t i = 0; i < threads; ++i) new (counters + i) Shares::Counter;
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t team = omp_get_num_threads();
    const Shares shares(counters, panels, team, panels_at_a_time(panels / team));
    shares.run(omp_get_thread_num(), [&](int64_t begin, int64_t end) { selected->linear(args, begin, end); });
  }
}

// Even shares: each thread writes memory of its own, which the system gives in large pages when it is first written.
static void pack(const PackArgs& args, int64_t num_panels, int64_t threads) {
  share_evenly(num_panels, num_panels * panel_bytes(args.linear), threads,
               [&](int64_t begin, int64_t end) { selected->pack_linear(args, begin, end); });
}

void pm_pack_linear(const PmLinear* linear, void* panels, const void* const* rows, int64_t num_panels, int64_t threads) {
  pack({*linear, rows, panels}, num_panels, threads);
}

int64_t pm_pack_codes(const PmLinear* linear, void* panels, const void* const* rows, const void* const* limits,
                      const int32_t* groups, const int32_t* order, int64_t num_panels, int64_t threads) {
  int64_t not_numbers = 0;
  pack({*linear, rows, panels, limits, groups, &not_numbers, order}, num_panels, threads);
  return not_numbers;
}

void pm_pack_words(const PmLinear* linear, void* panels, const PmOctet* octets, const int32_t* groups,
                   const int32_t* order, int64_t words, int64_t num_panels, int64_t threads) {
  pack({*linear, nullptr, panels, nullptr, groups, nullptr, order, octets, (PmWords)words}, num_panels, threads);
}

int64_t pm_pack_limits(void* out, const void* scales, const uint32_t* zeros, const uint32_t* shifts, int64_t rows,
                       int64_t cols, int64_t dtype, int64_t stride, int64_t zeros_stride, int64_t of_rows, int64_t first,
                       int64_t added, double unit) {
  return !selected->pack_limits({out, scales, zeros, shifts, rows, cols, dtype, stride, zeros_stride, of_rows, first,
                                 (uint32_t)added, (float)unit});
}
