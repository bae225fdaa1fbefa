// Gathers a decode batch from the slots, runs the plan and keeps what was sampled. Compiled for the baseline.
#include "decode_step.h"

#include <cstring>

#include "linear_rows.h"
#include "thread_buffer.h"

namespace {

// The first word of Philox-4x32-10 (Salmon et al., SC 2011) as a number in (0, 1); as worker/sampling/philox.py.
double uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)second;
    c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return ((double)c0 + 0.5) * 0x1p-32;
}

thread_local ThreadBuffer batch_memory;

// Cuts a piece of memory into arrays. Without memory, only measures.
class Arrays {
 public:
  explicit Arrays(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    char* at = memory_ + bytes;
    bytes += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return memory_ ? (T*)at : nullptr;
  }

  int64_t bytes = 0;

 private:
  char* memory_;
};

// What PmChoice points to, for the rows of a step.
class Choices {
 public:
  void lay_out(Arrays& arrays, int64_t count) {
    left_ = arrays.take<uint8_t>(count);
    greedy_ = arrays.take<uint8_t>(count);
    temperature_ = arrays.take<float>(count);
    min_p_ = arrays.take<float>(count);
    top_k_ = arrays.take<int32_t>(count);
    top_p_ = arrays.take<float>(count);
    uniforms_ = arrays.take<double>(count);
  }

  // `position`: of the token that row r samples; `leaves`: whether it does not.
  void gather(const PmSlots& state, int64_t r, int32_t slot, int64_t position, bool leaves) {
    left_[r] = leaves;
    greedy_[r] = state.greedy[slot];
    if (leaves || greedy_[r]) return;
    temperature_[r] = state.temperature[slot];
    min_p_[r] = state.min_p[slot];
    top_k_[r] = state.top_k[slot];
    top_p_[r] = state.top_p[slot];
    uniforms_[r] = uniform(state.seed[slot], (uint64_t)position);
  }

  bool leaves(int64_t r) const { return left_[r]; }

  PmChoice choice(int32_t* tokens, const uint32_t* const* masks) const {
    return {tokens, left_, greedy_, temperature_, min_p_, top_k_, top_p_, uniforms_, masks};
  }

 private:
  uint8_t *left_ = nullptr, *greedy_ = nullptr;
  float *temperature_ = nullptr, *min_p_ = nullptr, *top_p_ = nullptr;
  int32_t* top_k_ = nullptr;
  double* uniforms_ = nullptr;
};

// A slot without a token has another one, so that a step that is on its way already can run.
void append(const PmSlots& state, int32_t slot, int32_t token) {
  state.token_ids[slot * state.token_stride + state.num_tokens[slot]] = token < 0 ? 0 : token;
  ++state.num_tokens[slot];
  ++state.num_sampled[slot];
}

class DecodeBatch {
 public:
  DecodeBatch(const PmDecode& decode, const int32_t* slots, const int32_t* num_tokens, int64_t count)
      : decode_(decode), state_(decode.slots), slots_(slots), counts_(num_tokens), count_(count) {}

  // False: out of memory.
  bool gather(int32_t* tokens) {
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t length = state_.num_computed[slots_[r]] + counts_[r];
      num_tokens_ += counts_[r];
      num_rows_ += num_drafts(r) + 1;
      if (length > longest_) longest_ = length;
    }
    Arrays measured(nullptr);
    lay_out(measured);
    char* memory = (char*)batch_memory.reserve(measured.bytes);
    if (!memory) return false;
    Arrays arrays(memory);
    lay_out(arrays);
    query_start_[0] = 0;
    int64_t row = 0;
    for (int64_t r = 0; r < count_; ++r) row = gather_request(r, row);
    for (int64_t g = 0; g < decode_.num_tables; ++g) gather_table(g);
    for (int64_t i = 0; i < decode_.num_layers; ++i) layer_batches_[i] = batches_ + decode_.layer_tables[i];
    choice_ = choices_.choice(tokens, nullptr);
    return true;
  }

  // False: out of memory. `num_ops`: of the plan, without the choice or with it.
  bool run(int64_t num_ops, int64_t threads) const {
    if (num_tokens_ == num_rows_) {
      const PmRun whole = {positions_, num_rows_, decode_.buffers, decode_.widths, layer_batches_, &choice_, nullptr, 0};
      return pm_run_plan(decode_.ops, num_ops, &whole, threads) == 0;
    }
    // The head has fewer rows than the layers: those that are sampled from.
    const PmRun layers = {positions_, num_tokens_, decode_.buffers, decode_.widths, layer_batches_, nullptr,
                          sampled_rows_, num_rows_};
    if (pm_run_plan(decode_.ops, decode_.num_layer_ops, &layers, threads)) return false;
    gather_sampled_rows();
    const PmRun head = {nullptr, num_rows_, decode_.buffers, decode_.widths, nullptr, &choice_, nullptr, 0};
    return pm_run_plan(decode_.ops + decode_.num_layer_ops, num_ops - decode_.num_layer_ops, &head, threads) == 0;
  }

  // Tokens of all rows become those that are kept: each request's drafts as far as they were sampled, and one more.
  void keep(int32_t* tokens, int32_t* num_kept) const {
    int64_t row = 0, end = 0;
    for (int64_t r = 0; r < count_; ++r) {
      const int32_t slot = slots_[r];
      const int64_t most = num_drafts(r);
      const int32_t* drafts = state_.token_ids + slot * state_.token_stride + state_.num_tokens[slot];
      int64_t accepted = 0;
      while (accepted < most && tokens[row + accepted] == drafts[accepted]) ++accepted;
      const bool leaves = choices_.leaves(row);
      state_.num_computed[slot] += counts_[r] - most + accepted;
      for (int64_t i = 0; i <= accepted; ++i) {
        const int32_t token = tokens[row + i];
        if (!leaves) append(state_, slot, token);
        tokens[end++] = token;
      }
      num_kept[r] = (int32_t)accepted + 1;
      row += most + 1;
    }
  }

 private:
  void lay_out(Arrays& arrays) {
    positions_ = arrays.take<int64_t>(num_tokens_);
    sampled_rows_ = arrays.take<int64_t>(num_rows_);
    query_start_ = arrays.take<int32_t>(count_ + 1);
    seq_lens_ = arrays.take<int32_t>(count_);
    choices_.lay_out(arrays, num_rows_);
    batches_ = arrays.take<PmBatch>(decode_.num_tables);
    layer_batches_ = arrays.take<const PmBatch*>(decode_.num_layers);
    for (int64_t g = 0; g < decode_.num_tables; ++g) {
      int32_t* blocks = arrays.take<int32_t>(count_ * num_blocks(g));
      int64_t* mapping = arrays.take<int64_t>(num_tokens_);
      if (batches_)
        batches_[g] = {query_start_, seq_lens_, blocks, mapping, count_, num_tokens_, num_blocks(g),
                       decode_.tables[g].block_size};
    }
  }

  // Of the longest request, in table g.
  int64_t num_blocks(int64_t g) const {
    return (longest_ + decode_.tables[g].block_size - 1) / decode_.tables[g].block_size;
  }

  // Tokens of a request behind those that it has.
  int64_t num_drafts(int64_t r) const {
    return state_.num_computed[slots_[r]] + counts_[r] - state_.num_tokens[slots_[r]];
  }

  // Its first row is number `row` of those that are sampled from; returns that of the next request.
  int64_t gather_request(int64_t r, int64_t row) {
    const int32_t slot = slots_[r], first = query_start_[r], computed = state_.num_computed[slot];
    const int32_t* ids = state_.token_ids + slot * state_.token_stride + computed;
    for (int32_t i = 0; i < counts_[r]; ++i) {
      positions_[first + i] = computed + i;
      embed(ids[i], first + i);
    }
    query_start_[r + 1] = first + counts_[r];
    seq_lens_[r] = computed + counts_[r];
    for (int32_t i = state_.num_tokens[slot]; i <= seq_lens_[r]; ++i, ++row) {
      sampled_rows_[row] = first + i - computed - 1;
      choices_.gather(state_, row, slot, i, state_.processed[slot]);
    }
    return row;
  }

  void embed(int64_t token, int64_t t) const {
    look_up(decode_.embedding, decode_.rows, decode_.embedding_scale, decode_.source, token, t);
    for (int64_t i = 0; i < decode_.num_look_ups; ++i) {
      const PmLookUp& more = decode_.look_ups[i];
      look_up(more.embedding, more.rows, more.scale, more.buffer, token < more.known ? token : 0, t);
    }
  }

  // Row `token` of a table to row t of a buffer.
  void look_up(const PmLinear& table, const void* rows, double scale, int64_t buffer, int64_t token, int64_t t) const {
    const int64_t cols = table.cols;
    char* row = (char*)decode_.buffers[buffer] + t * cols * 2;
    if (rows)
      memcpy(row, (const char*)rows + token * cols * 2, cols * 2);
    else
      row_of_weight(table, token, row);
    if (scale != 1) scale_row(row, cols, (float)scale);
  }

  void gather_table(int64_t g) {
    const PmTable& table = decode_.tables[g];
    PmBatch& batch = batches_[g];
    const int64_t width = num_blocks(g);
    for (int64_t r = 0; r < count_; ++r) {
      const int32_t* blocks = table.blocks + slots_[r] * table.stride;
      memcpy((int32_t*)batch.block_table + r * width, blocks, width * sizeof(int32_t));
      for (int64_t t = query_start_[r]; t < query_start_[r + 1]; ++t) {
        const int64_t at = positions_[t];
        ((int64_t*)batch.slot_mapping)[t] = blocks[at / table.block_size] * table.block_size + at % table.block_size;
      }
    }
  }

  // Of what the layers gave, those that the head reads, to its beginning: no row comes to lie behind where it was.
  void gather_sampled_rows() const {
    const int64_t result = decode_.ops[decode_.num_layer_ops].in, bytes = decode_.widths[result] * 2;
    char* rows = (char*)decode_.buffers[result];
    for (int64_t r = 0; r < num_rows_; ++r)
      if (sampled_rows_[r] != r) memcpy(rows + r * bytes, rows + sampled_rows_[r] * bytes, bytes);
  }

  const PmDecode& decode_;
  const PmSlots& state_;
  const int32_t* slots_;
  const int32_t* counts_;  // tokens of each
  const int64_t count_;
  int64_t num_tokens_ = 0;
  int64_t num_rows_ = 0;  // that are sampled from
  int64_t longest_ = 0;  // tokens of a request, at most
  int64_t *positions_ = nullptr, *sampled_rows_ = nullptr;
  int32_t *query_start_ = nullptr, *seq_lens_ = nullptr;
  Choices choices_;
  PmBatch* batches_ = nullptr;
  const PmBatch** layer_batches_ = nullptr;
  PmChoice choice_ = {};
};

}  // namespace

int pm_decode_accepts(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count) {
  const PmSlots& state = decode->slots;
  bool changed = false;
  for (int64_t r = 0; r < count; ++r) {
    const int32_t slot = slots[r], computed = state.num_computed[slot];
    const int32_t num_drafts = computed + num_tokens[r] - state.num_tokens[slot];
    if (num_tokens[r] < 1 || num_drafts < 0 || num_drafts >= num_tokens[r]) return PM_NOT_A_DECODE_STEP;
    changed |= num_drafts > 0 && state.processed[slot];
    const int32_t* ids = state.token_ids + slot * state.token_stride + computed;
    for (int32_t i = 0; i < num_tokens[r]; ++i)
      if (ids[i] < 0 || ids[i] >= decode->embedding.rows) return PM_UNKNOWN_TOKEN;
  }
  if (count <= 0) return PM_NOT_A_DECODE_STEP;
  return changed ? PM_CHANGED_DRAFTS : PM_ACCEPTED;
}

int pm_decode_step(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count,
                   int32_t* tokens, int32_t* num_kept, int64_t threads) {
  DecodeBatch batch(*decode, slots, num_tokens, count);
  if (!batch.gather(tokens) || !batch.run(decode->num_ops, threads)) return 1;
  batch.keep(tokens, num_kept);
  return 0;
}

int pm_decode_logits(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count,
                     int64_t threads) {
  DecodeBatch batch(*decode, slots, num_tokens, count);
  return batch.gather(nullptr) && batch.run(decode->num_ops - 1, threads) ? 0 : 1;
}

int pm_decode_choose(const PmDecode* decode, const int32_t* slots, int64_t count, const PmMasks* masks, int32_t* tokens,
                     int64_t threads) {
  const PmSlots& state = decode->slots;
  Choices choices;
  const uint32_t** rows = nullptr;
  Arrays arrays(nullptr);
  for (int turn = 0; turn < 2; ++turn) {
    choices.lay_out(arrays, count);
    rows = arrays.take<const uint32_t*>(count);
    if (turn == 1) break;
    char* memory = (char*)batch_memory.reserve(arrays.bytes);
    if (!memory) return 1;
    arrays = Arrays(memory);
  }
  for (int64_t r = 0; r < count; ++r) {
    const int32_t row = masks->rows[r];
    choices.gather(state, r, slots[r], state.num_tokens[slots[r]], row == PM_LEFT);
    rows[r] = row < 0 ? nullptr : masks->words + row * masks->stride;
  }
  const PmChoice choice = choices.choice(tokens, rows);
  const PmRun run = {nullptr, count, decode->buffers, decode->widths, nullptr, &choice, nullptr, 0};
  if (pm_run_plan(decode->ops + decode->num_ops - 1, 1, &run, threads)) return 1;
  for (int64_t r = 0; r < count; ++r)
    if (!choices.leaves(r)) append(state, slots[r], tokens[r]);
  return 0;
}
