// Row-wise kernels of layers that keep several streams of hidden states side by side in a row (AltUp), and of the MLPs
// that come with them: bfloat16 rows, rounded where torch's composition of single operations rounds them.
#pragma once

#include "kernels.h"
#include "rows.h"

namespace {

// The elements [begin, end) of one stream, or of a row that has none.
struct Columns {
  int64_t begin, end;

  // body(offset, count), as for_vectors.
  template <class F>
  PM_INLINE void each(F body) const {
    for_vectors(end - begin, [&](int64_t d, int64_t n) { body(begin + d, n); });
  }
};

PM_INLINE float root(float x) { return __builtin_sqrtf(x); }

// x, scaled to the mean square of y where there is one, to a place in the row.
void place_stream(const StreamArgs& args, const bf16* x, const bf16* y, bf16* out, Columns cols) {
  if (!y) return cols.each([&](int64_t d, int64_t n) { store(out + args.column + d, load(x + d, n), n); });
  constexpr float LEAST = 1e-5f;
  const float found = mean_of_squares(x, args.x_width), wanted = mean_of_squares(y, args.x_width);
  const vf factor = splat(root(wanted / (found < LEAST ? LEAST : found)));
  cols.each([&](int64_t d, int64_t n) { store(out + args.column + d, load(x + d, n) * factor, n); });
}

void pick_stream(const StreamArgs& args, const bf16* x, bf16* out, Columns cols) {
  const bf16 *from = x + args.column, *weight = (const bf16*)args.weight;
  cols.each([&](int64_t d, int64_t n) {
    store(out + d, weight ? load(from + d, n) * load(weight + d, n) : load(from + d, n), n);
  });
}

// Each stream and the sum of all, each times its coefficient of that one: [S, S] of them in y.
void mix_streams(const StreamArgs& args, const bf16* x, const bf16* y, bf16* out, Columns cols) {
  const int64_t count = args.count, size = args.x_width / count;
  for (int64_t i = 0; i < count; ++i)
    cols.each([&](int64_t d, int64_t n) {
      vf sum = {};
      for (int64_t j = 0; j < count; ++j) sum = fma(load(x + j * size + d, n), splat(element(y + i * count + j)), sum);
      store(out + i * size + d, load(x + i * size + d, n) + rounded_to<bf16>(sum), n);
    });
}

// Each stream of x and what is new in y, compared with the one from `column` on, times the stream's coefficient in z
// plus 1.
void correct_streams(const StreamArgs& args, const bf16* x, const bf16* y, const bf16* z, bf16* out, Columns cols) {
  const int64_t size = args.x_width / args.count;
  for (int64_t i = 0; i < args.count; ++i) {
    const vf factor = rounded_to<bf16>(splat(element(z + i)) + 1.0f);
    cols.each([&](int64_t d, int64_t n) {
      const vf news = rounded_to<bf16>(load(y + d, n) - load(x + args.column + d, n));
      store(out + i * size + d, load(x + i * size + d, n) + rounded_to<bf16>(news * factor), n);
    });
  }
}

// y added to all streams but the first.
void add_to_others(const StreamArgs& args, const bf16* x, const bf16* y, bf16* out, Columns cols) {
  const int64_t size = args.x_width / args.count;
  cols.each([&](int64_t d, int64_t n) { store(out + d, load(x + d, n), n); });
  for (int64_t i = 1; i < args.count; ++i)
    cols.each([&](int64_t d, int64_t n) { store(out + i * size + d, load(x + i * size + d, n) + load(y + d, n), n); });
}

void mean_of_streams(const StreamArgs& args, const bf16* x, bf16* out, Columns cols) {
  const vf count = splat((float)args.count);
  cols.each([&](int64_t d, int64_t n) {
    vf sum = load(x + d, n);
    for (int64_t i = 1; i < args.count; ++i) sum += load(x + i * args.out_width + d, n);
    store(out + d, sum / count, n);
  });
}

void bound_row(const StreamArgs& args, const bf16* x, bf16* out, Columns cols) {
  const vf factor = splat(args.factor);
  cols.each([&](int64_t d, int64_t n) { store(out + d, tanh_of(load(x + d, n) / factor), n); });
}

// GELU in its tanh form of what gates are above mean + factor * deviation of them, else of 0; times the second half.
void gate_sparsely(const StreamArgs& args, const bf16* x, bf16* out, Columns cols) {
  const int64_t width = args.out_width;
  const vf mean = splat(mean_of(x, width, [](vf v) { return v; }));
  const float deviation = root(mean_of(x, width, [&](vf v) { return (v - mean) * (v - mean); }));
  const vf limit = mean + splat(deviation * args.factor);
  cols.each([&](int64_t d, int64_t n) {
    const vf above = rounded_to<bf16>(Relu::apply(load(x + d, n) - limit));
    store(out + d, rounded_to<bf16>(GeluTanh::apply(above)) * load(x + width + d, n), n);
  });
}

void weigh_row(const bf16* x, const bf16* y, bf16* out, Columns cols) {
  const vf factor = rounded_to<bf16>(1.0f / (1.0f + exp_of(-splat(element(y)))));
  cols.each([&](int64_t d, int64_t n) { store(out + d, load(x + d, n) * factor, n); });
}

// The columns of piece `piece` of `pieces` of what a kernel goes through in a row.
Columns piece_of(const StreamArgs& args, int64_t piece, int64_t pieces) {
  const bool from_one = args.kind == PM_STREAM_PLACE, of_many = args.kind == PM_STREAM_MIX ||
      args.kind == PM_STREAM_CORRECT || args.kind == PM_STREAM_ADD_TO_OTHERS;
  const int64_t width = from_one ? args.x_width : of_many ? args.out_width / args.count : args.out_width;
  const auto edge = [&](int64_t at) { return at == pieces ? width : width * at / pieces / LANES * LANES; };
  return {edge(piece), edge(piece + 1)};
}

// Pieces [begin, end) of those of all rows, each of which has `pieces`.
void streams(const StreamArgs& args, int64_t begin, int64_t end, int64_t pieces) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t r = i / pieces;
    const bf16 *x = (const bf16*)args.x + r * args.x_width, *y = (const bf16*)args.y, *z = (const bf16*)args.z;
    if (y) y += r * args.y_width;
    if (z) z += r * args.z_width;
    bf16* out = (bf16*)args.out + r * args.out_width;
    const Columns cols = piece_of(args, i % pieces, pieces);
    switch (args.kind) {
      case PM_STREAM_PLACE:
        place_stream(args, x, y, out, cols);
        break;
      case PM_STREAM_PICK:
        pick_stream(args, x, out, cols);
        break;
      case PM_STREAM_MIX:
        mix_streams(args, x, y, out, cols);
        break;
      case PM_STREAM_CORRECT:
        correct_streams(args, x, y, z, out, cols);
        break;
      case PM_STREAM_ADD_TO_OTHERS:
        add_to_others(args, x, y, out, cols);
        break;
      case PM_STREAM_MEAN:
        mean_of_streams(args, x, out, cols);
        break;
      case PM_STREAM_BOUND:
        bound_row(args, x, out, cols);
        break;
      case PM_STREAM_SPARSE_GATE:
        gate_sparsely(args, x, out, cols);
        break;
      case PM_STREAM_WEIGH:
        weigh_row(x, y, out, cols);
        break;
    }
  }
}

}  // namespace
