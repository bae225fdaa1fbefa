// Where tokens were seen before: a table of n-grams of one text, and a trie of the short substrings of one or more texts.
// All memory is the caller's: the arrays below are made, grown and dropped in Python, so their size is decided there.
#pragma once

#include "kernels.h"

// The n-grams of a text, for each length from `shortest` to `longest`; `NgramTable` in mirrors.py mirrors it.
struct PmNgrams {
  const int32_t* text;
  int32_t* ends;  // [longest - shortest + 1, 1 << bits]: where a gram last ended, before the token there; 0: none
  int64_t bits;
  int64_t shortest;
  int64_t longest;
  int64_t seed;  // of the hashes: nobody shall be able to write a text that is slow to look up
};

struct PmTrieNode {
  int32_t parent;
  int32_t token;
  int32_t count;  // times that the string was seen
  int32_t best;   // the child seen most often, of several the one seen last; -1: none
  int32_t leaf;   // seen once, or a second time just now: its continuation in the text; -1: it has children of its own
  int32_t depth;
};

// Substrings of at most `max_depth` tokens; `Trie` in mirrors.py mirrors it. The text may be several, each of which ends
// with -1; a root belongs to one group of texts.
struct PmTrie {
  const int32_t* text;
  PmTrieNode* nodes;
  int32_t* slots;  // [1 << bits] node + 1, found by parent and token; 0: empty
  int32_t* active;  // [max_depth + 1] where the suffixes of the text that were seen before stand
  int64_t bits;
  int64_t max_nodes;
  int64_t max_depth;
  int64_t num_nodes;
  int64_t num_active;
  int64_t num_tokens;  // of the text that are in
  int64_t seed;        // of the hashes
};

// The grams that end in [begin, end), each followed by a token that is known.
PM_EXPORT void pm_ngrams_extend(const PmNgrams* table, int64_t begin, int64_t end);
// Where the text may go on as it did before: behind the longest of the last tokens of text[:count] where that was seen
// last; 0: nowhere. `copied`, below count: where it would go on if it still copied what it copied before; 0: it did not.
// That counts where more tokens before it are the last ones, and where these were never seen together: a place near it
// then, behind the same last token, or itself, where it differs in a few tokens only.
PM_EXPORT int64_t pm_ngrams_find(const PmNgrams* table, int64_t count, int64_t copied);
// Both for each of `count` texts: the grams that end in [begins, ends), and then in `found` what pm_ngrams_find says of
// text[:ends].
PM_EXPORT void pm_ngrams_follow(const PmNgrams* const* tables, int64_t count, const int32_t* begins,
                                const int32_t* ends, const int32_t* copied, int32_t* found);
// Finds the nodes by an empty table again, after it grew. Roots, which have no parent, are in none.
PM_EXPORT void pm_trie_rehash(const PmTrie* trie);
// Adds tokens up to text[:count]; how many are in, which is less where there is no node left.
PM_EXPORT int64_t pm_trie_extend(PmTrie* trie, int64_t root, int64_t count);
// What may follow the last of `count` tokens: at most `most` of them, and `factor` times the tokens that match; only as
// long as it is likelier than `least`. `own`: the text ends with these very tokens, which count for nothing. Returns how
// many are in `out`, and in `score` how many are expected to come true.
PM_EXPORT int64_t pm_trie_propose(const PmTrie* trie, int64_t root, const int32_t* tokens, int64_t count, int64_t most,
                                  double factor, double least, int64_t own, int32_t* out, double* score);
