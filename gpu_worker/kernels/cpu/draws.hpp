// Draws from logits with counter-based noise: what gpu_worker/sampling/law.py does in torch, for the whole vocabulary.
#pragma once
#include <cstdint>

#include "team.hpp"

namespace dl {

constexpr int kMaxDraws = 64;

// For each of `rows` rows: the `count` columns of the largest weights[row, column] + Gumbel(keys[row], id of column),
// descending, ties by lower column, and those sums. A row's ids[n] begin ids_stride behind those of the row before (0: all
// share them); null: column c is id c. Weights of -inf are never drawn; where fewer than `count` columns are left, the
// rest is column 0 with -inf.
void run_gumbel_topk(Team& team, const float* weights, const int64_t* ids, int64_t ids_stride, const int64_t* keys,
                     int64_t rows, int64_t n, int32_t count, int64_t* columns, float* values);

// The key of the coupled noise at a position: coupled_keys of gpu_worker/sampling/random.py.
int64_t coupled_key(int64_t seed, int64_t position);

}  // namespace dl
