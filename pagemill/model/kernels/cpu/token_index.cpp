// Indexes of tokens for drafts: see token_index.h. Knows no model. worker/spec_decode/index_reference.py does the same.
#include "token_index.h"

#include <cstring>
#include <initializer_list>

namespace {

constexpr int64_t MAX_DRAFT = 64;
constexpr int64_t COMPARED = 32;  // tokens before two places, at most, by which one of them is chosen
constexpr int64_t NEAR = 3;       // tokens by which a copy may have become longer or shorter where it differs
constexpr int64_t SEEN = 8;       // tokens before a place, of which
constexpr int64_t ALIKE = 6;      // so many are those of the copy, if it is one still

uint64_t mix(uint64_t value) {
  value ^= value >> 32;
  value *= 0x9E3779B97F4A7C15ull;
  value ^= value >> 29;
  return value * 0xBF58476D1CE4E5B9ull;
}

// The place in the table of grams of one length that holds this gram, or that would.
int32_t* gram_place(const PmNgrams& table, const int32_t* gram, int64_t length) {
  uint64_t hash = static_cast<uint64_t>(table.seed);
  for (int64_t i = 0; i < length; ++i) hash = mix(hash ^ static_cast<uint32_t>(gram[i]));
  int32_t* ends = table.ends + ((length - table.shortest) << table.bits);
  const uint64_t mask = (1ull << table.bits) - 1;
  uint64_t place = hash >> (64 - table.bits);
  while (ends[place] && memcmp(table.text + ends[place] - length, gram, length * sizeof(int32_t)) != 0) {
    place = (place + 1) & mask;
  }
  return ends + place;
}

int32_t* child_slot(const PmTrie& trie, int32_t parent, int32_t token) {
  const uint64_t mask = (1ull << trie.bits) - 1;
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 32 | static_cast<uint32_t>(token);
  uint64_t place = mix(mix(key ^ static_cast<uint64_t>(trie.seed))) >> (64 - trie.bits);
  for (; trie.slots[place]; place = (place + 1) & mask) {
    const PmTrieNode& node = trie.nodes[trie.slots[place] - 1];
    if (node.parent == parent && node.token == token) break;
  }
  return trie.slots + place;
}

// A string that is seen for the first time, in an empty slot of the table.
int32_t add_child(PmTrie& trie, int32_t parent, int32_t token, int32_t leaf, int32_t* slot) {
  const int32_t made = static_cast<int32_t>(trie.num_nodes++);
  PmTrieNode& above = trie.nodes[parent];
  trie.nodes[made] = {parent, token, 1, -1, leaf, above.depth + 1};
  *slot = made + 1;
  if (above.best < 0 || trie.nodes[above.best].count <= 1) above.best = made;
  return made;
}

// One token more; false: nothing was done, for want of nodes.
bool append(PmTrie& trie, int32_t root) {
  if (trie.num_nodes + 2 * (trie.num_active + 1) > trie.max_nodes) return false;
  const int64_t position = trie.num_tokens++;
  const int32_t token = trie.text[position];
  if (token < 0) {
    trie.num_active = 0;
    return true;
  }
  trie.active[trie.num_active++] = root;
  int64_t kept = 0;
  for (int64_t i = 0; i < trie.num_active; ++i) {
    const int32_t at = trie.active[i];
    PmTrieNode& node = trie.nodes[at];
    if (node.leaf >= 0) {
      const int32_t next = trie.text[node.leaf];
      if (next >= 0) add_child(trie, at, next, node.leaf + 1, child_slot(trie, at, next));
      node.leaf = -1;
    }
    int32_t* slot = child_slot(trie, at, token);
    if (!*slot) {
      add_child(trie, at, token, static_cast<int32_t>(position + 1), slot);
      continue;
    }
    const int32_t child = *slot - 1;
    const int32_t count = ++trie.nodes[child].count;
    if (count >= trie.nodes[node.best].count) node.best = child;
    if (trie.nodes[child].depth < trie.max_depth) trie.active[kept++] = child;
  }
  trie.num_active = kept;
  return true;
}

// A string of the trie: a node, or what lies behind a leaf, in the text.
struct Place {
  int32_t node;
  int64_t behind;  // its continuation in the text, where the node is a leaf; -1: it is the node, which has children
};

bool walk(const PmTrie& trie, int32_t root, const int32_t* tokens, int64_t count, Place* found) {
  Place place = {root, -1};
  for (int64_t i = 0; i < count; ++i) {
    if (place.behind >= 0) {
      if (place.behind >= trie.num_tokens || trie.text[place.behind] != tokens[i]) return false;
      ++place.behind;
      continue;
    }
    const int32_t child = *child_slot(trie, place.node, tokens[i]) - 1;
    if (child < 0) return false;
    place = {child, trie.nodes[child].leaf};
  }
  *found = place;
  return true;
}

// The most likely tokens from a place that was seen `total` times, into `draft`; how many, and in `sum` how many of them
// are expected to come true.
int64_t likely(const PmTrie& trie, Place place, int64_t total, int64_t limit, double least, int32_t* draft,
               double* sum) {
  double chance = 1;
  int64_t length = 0;
  while (length < limit) {
    const bool behind = place.behind >= 0;
    const int32_t best = behind ? -1 : trie.nodes[place.node].best;
    if (behind ? place.behind >= trie.num_tokens || trie.text[place.behind] < 0 : best < 0) break;
    const int64_t times = behind ? 1 : trie.nodes[best].count;
    chance *= static_cast<double>(times) / static_cast<double>(total);
    if (chance < least) break;
    *sum += chance;
    total = times;
    if (behind) {
      draft[length++] = trie.text[place.behind++];
    } else {
      draft[length++] = trie.nodes[best].token;
      place = {best, trie.nodes[best].leaf};
    }
  }
  return length;
}

// Tokens before two places that are equal, counted from the end.
int64_t common(const int32_t* text, int64_t place, int64_t count) {
  int64_t length = 0;
  while (length < COMPARED && length < place && text[place - 1 - length] == text[count - 1 - length]) ++length;
  return length;
}

// Where a copy goes on that differs from what it copies: see pm_ngrams_find.
int64_t resume(const int32_t* text, int64_t count, int64_t copied) {
  for (int64_t away = 0; away <= NEAR; ++away) {
    for (const int64_t place : {copied + away, copied - away}) {
      if (place > 0 && place < count && text[place - 1] == text[count - 1]) return place;
    }
  }
  int64_t alike = 0;
  for (int64_t back = 1; back <= SEEN && back <= copied; ++back) alike += text[copied - back] == text[count - back];
  return alike >= ALIKE ? copied : 0;
}

}  // namespace

void pm_ngrams_extend(const PmNgrams* table, int64_t begin, int64_t end) {
  for (int64_t length = table->shortest; length <= table->longest; ++length) {
    for (int64_t at = begin < length ? length : begin; at < end; ++at) {
      *gram_place(*table, table->text + at - length, length) = static_cast<int32_t>(at);
    }
  }
}

int64_t pm_ngrams_find(const PmNgrams* table, int64_t count, int64_t copied) {
  for (int64_t length = table->longest < count ? table->longest : count - 1; length >= table->shortest; --length) {
    const int32_t end = *gram_place(*table, table->text + count - length, length);
    if (!end) continue;
    return copied && common(table->text, copied, count) > common(table->text, end, count) ? copied : end;
  }
  return copied ? resume(table->text, count, copied) : 0;
}

void pm_ngrams_follow(const PmNgrams* const* tables, int64_t count, const int32_t* begins, const int32_t* ends,
                      const int32_t* copied, int32_t* found) {
  for (int64_t i = 0; i < count; ++i) {
    pm_ngrams_extend(tables[i], begins[i], ends[i]);
    found[i] = static_cast<int32_t>(pm_ngrams_find(tables[i], ends[i], copied[i]));
  }
}

void pm_trie_rehash(const PmTrie* trie) {
  for (int64_t i = 0; i < trie->num_nodes; ++i) {
    const PmTrieNode& node = trie->nodes[i];
    if (node.parent >= 0) *child_slot(*trie, node.parent, node.token) = static_cast<int32_t>(i + 1);
  }
}

int64_t pm_trie_extend(PmTrie* trie, int64_t root, int64_t count) {
  while (trie->num_tokens < count && append(*trie, static_cast<int32_t>(root))) {
  }
  return trie->num_tokens;
}

int64_t pm_trie_propose(const PmTrie* trie, int64_t root, const int32_t* tokens, int64_t count, int64_t most,
                        double factor, double least, int64_t own, int32_t* out, double* score) {
  int64_t found = 0;
  *score = 0;
  for (int64_t match = 1; match <= count && match < trie->max_depth; ++match) {
    Place place;
    if (!walk(*trie, static_cast<int32_t>(root), tokens + count - match, match, &place)) break;
    const int64_t total = trie->nodes[place.node].count - own;
    if (total <= 0 || (own && place.behind >= trie->num_tokens)) break;  // it was never seen but here
    const int64_t may = static_cast<int64_t>(static_cast<double>(match) * factor);
    int64_t limit = trie->max_depth - match;
    if (limit > MAX_DRAFT) limit = MAX_DRAFT;
    if (limit > most) limit = most;
    if (limit > may) limit = may;
    int32_t draft[MAX_DRAFT];
    double sum = 0;
    const int64_t length = likely(*trie, place, total, limit, least, draft, &sum);
    if (length && sum >= *score) {
      found = length;
      *score = sum;
      memcpy(out, draft, length * sizeof(int32_t));
    }
  }
  return found;
}
