// What the operations of a plan do to some rows of their buffers; which rows, layer_plan.cpp says.
#pragma once

#include <string.h>

#include "layer_plan.h"
#include "parallel.h"
#include "selected.h"
#include "thread_buffer.h"

namespace {

typedef uint16_t element;  // bfloat16; nothing is computed here

struct Share {
  int64_t begin, end;
};

// The norm that a thread computed for itself last, and the buffer that it stands for.
struct OwnNorm {
  char* memory;
  int64_t buffer;
  int64_t stride;
};

class PlanRows {
 public:
  explicit PlanRows(const PmRun& run) : run_(run) {}

 protected:
  element* buffer(int64_t index) const { return (element*)run_.buffers[index]; }
  element* row(int64_t index, int64_t r) const { return buffer(index) + r * run_.widths[index]; }

  AttentionArgs attention_args(const PmOp& op) const {
    const PmLayer& layer = op.layer;
    const int64_t width = run_.widths[op.in];
    const element* query = buffer(op.in);
    const element* key = query + layer.num_heads * layer.head_size;
    const element* value = key + layer.num_kv_heads * layer.head_size;
    const PmTensors tensors = {op.out < 0 ? nullptr : buffer(op.out), query, key, value, op.kv_cache, width, width,
                               width, op.values_offset, op.block_stride, PM_BFLOAT16, op.kv_dtype};
    return {tensors, *run_.batches[op.group], layer};
  }

  // Of what PREPARE_LATENT has left for ATTEND, where keys are values too.
  AttentionArgs latent_args(const PmOp& op) const {
    const PmLayer& layer = op.layer;
    const int64_t width = run_.widths[op.out];
    const element* query = buffer(op.out);
    const element* key = query + layer.num_heads * layer.head_size;
    const PmTensors tensors = {nullptr, query, key, key, op.kv_cache, width, width, width, op.values_offset,
                               op.block_stride, PM_BFLOAT16, op.kv_dtype};
    return {tensors, *run_.batches[op.group], layer};
  }

  NormArgs norm_args(const PmOp& op, void* out, void* sum) const {
    const int64_t cols = run_.widths[op.out];
    const void* residual = op.residual_in < 0 ? nullptr : buffer(op.residual_in);
    return {out, buffer(op.in), residual, sum, op.weight, cols, 1, run_.widths[op.in], PM_BFLOAT16, op.weight_dtype,
            (float)op.eps, op.centers, op.second_weight};
  }

  LinearArgs linear_args(const PmOp& op) const {
    return {op.linear, buffer(op.in), buffer(op.out), run_.num_tokens, run_.widths[op.in], run_.widths[op.out],
            op.out_dtype};
  }

  static void quantize_own(LinearArgs& args) {
    static thread_local ThreadBuffer own_rows;
    const int64_t bytes = selected->quantized_bytes(args);
    if (!bytes) return;
    args.quantized = own_rows.at_least(bytes);
    selected->quantize_rows(args, 0, args.num_rows);
  }

  // Of any operation but ATTEND, CHOOSE and EXPERTS.
  void run_rows(const PmOp& op, Share rows) const {
    switch (op.kind) {
      case PM_OP_NORM:
        selected->norm(norm_args(op, buffer(op.out), op.residual_out < 0 ? nullptr : buffer(op.residual_out)),
                       rows.begin, rows.end);
        break;
      case PM_OP_LINEAR:
        multiply_rows(linear_args(op), rows);
        break;
      case PM_OP_PREPARE:
        prepare_tokens(op, rows);
        break;
      case PM_OP_ADD:
        add(op, rows);
        break;
      case PM_OP_SCALE:
        scale(op, {rows.begin * run_.widths[op.out], rows.end * run_.widths[op.out]});
        break;
      case PM_OP_SOFT_CAP:
        soft_cap(op, {rows.begin * run_.widths[op.out], rows.end * run_.widths[op.out]});
        break;
      case PM_OP_MULTIPLY:
        multiply(op, rows);
        break;
      case PM_OP_NORM_PARTS:
        norm_parts(op, {rows.begin * parts_of(op), rows.end * parts_of(op)});
        break;
      case PM_OP_LOOK_UP:
        look_up(op, rows);
        break;
      case PM_OP_EMBED:
        embed(op, rows);
        break;
      case PM_OP_GATE:
        gate(op, rows);
        break;
      case PM_OP_STREAMS:
        streams(op, rows, 1);
        break;
      case PM_OP_PREPARE_LATENT:
        prepare_latent(op, rows);
        break;
      case PM_OP_HEADS:
        for (int64_t h = 0; h < op.heads->count; ++h) multiply_rows(head_args(op, h), rows);
        break;
      case PM_OP_ROUTE:
        selected->route({*op.routing, (const float*)run_.buffers[op.in], (float*)run_.buffers[op.out]}, rows.begin,
                        rows.end);
        break;
    }
  }

  // `own`: what this thread has of what the last norm gave, or null.
  void add(const PmOp& op, Share rows, const OwnNorm* own = nullptr) const {
    const int64_t width = run_.widths[op.out];
    const ElementArgs args = {buffer(op.out), normed_or(op.in, own), normed_or(op.residual_in, own), PM_BFLOAT16,
                              PM_NO_ACTIVATION, 0};
    selected->add(args, rows.begin * width, rows.end * width);
  }

  // Elements [begin, end) of all rows.
  void scale(const PmOp& op, Share share, const OwnNorm* own = nullptr) const {
    const ElementArgs args = {run_.buffers[op.out], normed_or(op.in, own), nullptr, op.out_dtype, PM_NO_ACTIVATION,
                              (float)op.factor};
    selected->scale(args, share.begin, share.end);
  }

  // Elements [begin, end) of all rows, of float32.
  void soft_cap(const PmOp& op, Share share) const {
    const ElementArgs args = {run_.buffers[op.out], run_.buffers[op.in], nullptr, PM_FLOAT32, PM_NO_ACTIVATION,
                              (float)op.factor};
    selected->soft_cap(args, share.begin, share.end);
  }

  // Pieces [begin, end) of those of all rows, of which each has `pieces`.
  void streams(const PmOp& op, Share share, int64_t pieces, const OwnNorm* own = nullptr) const {
    const auto input = [&](int64_t index) { return index < 0 ? nullptr : normed_or(index, own); };
    const auto width = [&](int64_t index) { return index < 0 ? 0 : run_.widths[index]; };
    const StreamArgs args = {op.stream, buffer(op.out), input(op.in), input(op.residual_in), input(op.third_in),
                             op.weight, width(op.out), width(op.in), width(op.residual_in), width(op.third_in),
                             op.columns, op.num_streams, (float)op.factor};
    selected->streams(args, share.begin, share.end, pieces);
  }

  LinearArgs head_args(const PmOp& op, int64_t head) const {
    const PmHeads& heads = *op.heads;
    return {heads.layers[head], buffer(op.in) + head * heads.in_step + heads.in_first,
            buffer(op.out) + head * heads.out_step + heads.out_first, run_.num_tokens, run_.widths[op.in],
            run_.widths[op.out], PM_BFLOAT16};
  }

  // Parts of a row, and [begin, end) of those of all rows.
  int64_t parts_of(const PmOp& op) const { return run_.widths[op.out] / op.columns; }
  void norm_parts(const PmOp& op, Share parts) const {
    const NormArgs args = {buffer(op.out), buffer(op.in), nullptr, nullptr, op.weight, op.columns, 1, op.columns,
                           PM_BFLOAT16, op.weight_dtype, (float)op.eps, 0, nullptr};
    selected->norm(args, parts.begin, parts.end);
  }

  // A buffer, or where this thread has what it stands for.
  const void* normed_or(int64_t index, const OwnNorm* own) const {
    return own && own->buffer == index ? (const void*)own->memory : buffer(index);
  }

  const PmRun& run_;

 private:
  static void multiply_rows(LinearArgs args, Share rows) {
    args.x = (const element*)args.x + rows.begin * args.x_stride;
    args.out = (char*)args.out + rows.begin * args.out_stride * (args.out_dtype == PM_FLOAT32 ? 4 : 2);
    args.num_rows = rows.end - rows.begin;
    quantize_own(args);
    selected->linear(args, 0, num_panels(args.linear));
  }

  void prepare_tokens(const PmOp& op, Share share) const {
    const PmLayer& layer = op.layer;
    const int64_t width = run_.widths[op.in], size = layer.head_size, query_size = layer.num_heads * size;
    for (int64_t t = share.begin; t < share.end; ++t) {
      element* query = row(op.in, t);
      element* key = query + query_size;
      element* value = key + layer.num_kv_heads * size;
      if (op.key_is_value) memcpy(value, key, layer.num_kv_heads * size * sizeof(element));
      if (!op.norms_last) normalise(op, query, key, value);
      const int64_t turned = layer.num_heads + (op.shared ? 0 : layer.num_kv_heads);
      if (op.cos) rotate(op, query, turned, width, run_.positions[t]);
      if (op.norms_last) normalise(op, query, key, value);
      if (op.growth) grow(op, query, query_size, run_.positions[t]);
    }
    if (share.begin < share.end && !op.shared) selected->write_kv(attention_args(op), share.begin, share.end);
  }

  void prepare_latent(const PmOp& op, Share share) const {
    const PmLayer& layer = op.layer;
    const int64_t size = layer.head_size, turned = op.columns, given = run_.widths[op.in] / layer.num_heads;
    for (int64_t t = share.begin; t < share.end; ++t) {
      const element *query = row(op.in, t), *kept = row(op.residual_in, t);
      element* out = row(op.out, t);
      element* key = out + layer.num_heads * size;
      for (int64_t h = 0; h < layer.num_heads; ++h) memcpy(out + h * size, query + h * given, turned * sizeof(element));
      memcpy(key, kept, turned * sizeof(element));
      const NormArgs norm = {key + turned, kept + turned, nullptr, nullptr, op.weight, size - turned, 1, size - turned,
                             PM_BFLOAT16, op.weight_dtype, (float)op.eps, 0, nullptr};
      selected->norm(norm, 0, 1);
      rotate(op, out, layer.num_heads + 1, run_.widths[op.out], run_.positions[t]);
    }
    if (share.begin < share.end) selected->write_kv(latent_args(op), share.begin, share.end);
  }

  void normalise(const PmOp& op, element* query, element* key, element* value) const {
    const PmLayer& layer = op.layer;
    if (op.weight) normalise_heads(op, query, op.weight, layer.num_heads);
    if (op.second_weight) normalise_heads(op, key, op.second_weight, layer.num_kv_heads);
    if (op.third_weight) normalise_heads(op, value, op.third_weight, layer.num_kv_heads);
  }

  void grow(const PmOp& op, element* query, int64_t size, int64_t position) const {
    const float factor = op.growth[(position + 1) / op.growth_step];
    selected->scale({query, query, nullptr, PM_BFLOAT16, PM_NO_ACTIVATION, factor}, 0, size);
  }

  void normalise_heads(const PmOp& op, element* heads, const void* weight, int64_t count) const {
    if (op.centers && op.weight_dtype == PM_FLOAT32) return center_heads(op, heads, (const float*)weight, count);
    const int64_t size = op.whole_norms ? count * op.layer.head_size : op.layer.head_size;
    const void* bias = op.centers ? (const element*)weight + size : nullptr;
    const NormArgs args = {heads, heads, nullptr, nullptr, weight, size, 1, size, PM_BFLOAT16, op.weight_dtype,
                           (float)op.eps, op.centers, bias};
    selected->norm(args, 0, op.whole_norms ? 1 : count);
  }

  void center_heads(const PmOp& op, element* heads, const float* weights, int64_t count) const {
    const int64_t size = op.layer.head_size;
    for (int64_t h = 0; h < count; ++h, heads += size, weights += size)
      selected->norm({heads, heads, nullptr, nullptr, weights, size, 1, size, PM_BFLOAT16, PM_FLOAT32, (float)op.eps, 1,
                      nullptr}, 0, 1);
  }

  // Query and key lie side by side, so they are rotated together.
  void rotate(const PmOp& op, element* x, int64_t heads, int64_t width, int64_t position) const {
    const int64_t at = position * op.table_stride * (op.table_dtype == PM_FLOAT32 ? 4 : 2);
    const RopeArgs args = {x, heads, op.layer.head_size, width, PM_BFLOAT16, (const char*)op.cos + at,
                           (const char*)op.sin + at, op.half, op.table_stride, op.table_dtype};
    selected->rope(args, 0, 1);
  }

  void multiply(const PmOp& op, Share rows) const {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const ElementArgs args = {row(op.out, t), row(op.in, t), row(op.residual_in, t) + op.columns, PM_BFLOAT16,
                                PM_NO_ACTIVATION, 0};
      selected->multiply(args, 0, run_.widths[op.out]);
    }
  }

  void look_up(const PmOp& op, Share rows) const {
    const int64_t width = run_.widths[op.out];
    for (int64_t t = rows.begin; t < rows.end; ++t)
      memcpy(row(op.out, t), (const element*)op.weight + run_.positions[t] * width, width * sizeof(element));
  }

  void embed(const PmOp& op, Share rows) const {
    const int64_t width = run_.widths[op.out];
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const void* sum = (const element*)op.weight + run_.tokens[t] * width;
      const auto add_row = [&](const void* table, int64_t at) {
        if (!table) return;
        selected->add({row(op.out, t), sum, (const element*)table + at * width, PM_BFLOAT16, PM_NO_ACTIVATION}, 0, width);
        sum = row(op.out, t);
      };
      add_row(op.second_weight, run_.positions[t]);
      add_row(op.third_weight, run_.types ? run_.types[t] : 0);
      if (sum != row(op.out, t)) memcpy(row(op.out, t), sum, width * sizeof(element));
    }
  }

  void gate(const PmOp& op, Share rows) const {
    const int64_t width = run_.widths[op.out], in_width = run_.widths[op.in];
    const ActivationArgs args = {buffer(op.out), buffer(op.in), width, in_width, PM_BFLOAT16, op.gate};
    selected->activation(args, rows.begin, rows.end);
  }
};

}  // namespace
