// The C interface: checks what callers may get wrong and turns exceptions into return values.
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "draftline_cpu.h"
#include "draws.hpp"
#include "error.hpp"
#include "head.hpp"
#include "kv_pool.hpp"
#include "medusa.hpp"
#include "model.hpp"
#include "residual_block.hpp"
#include "team.hpp"

struct DlTeam {
  explicit DlTeam(int num_threads) : team(num_threads) {}
  dl::Team team;
};

namespace {

thread_local std::string last_error;

template <class Fn>
int32_t guarded(Fn&& fn) {
  try {
    fn();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

template <class T, class Fn>
T* created(Fn&& fn) {
  T* result = nullptr;
  guarded([&] { result = fn(); });
  return result;
}

const dl::Kernels& kernels(int32_t isa) {
  const dl::Kernels* found = dl::kernels_for(isa);
  dl::require(found != nullptr, "isa: " + std::to_string(isa) + " is not compiled in or not supported by this processor");
  return *found;
}

void check_slots(const DlPool& pool, int64_t layer, const int64_t* slots, int64_t count) {
  dl::require(layer >= 0 && layer < pool.num_layers, "layer: " + std::to_string(layer));
  for (int64_t i = 0; i < count; i++) {
    dl::require(slots[i] >= 0 && slots[i] < pool.num_slots,
                "slots: " + std::to_string(slots[i]) + " is not in 0.." + std::to_string(pool.num_slots - 1));
  }
}

}  // namespace

int32_t dl_abi_version() { return kDlAbiVersion; }
const char* dl_last_error() { return last_error.c_str(); }
int32_t dl_best_isa() { return dl::best_isa(); }
int32_t dl_isa_supported(int32_t isa) { return dl::kernels_for(isa) != nullptr ? 1 : 0; }

DlTeam* dl_team_create(int32_t num_threads) {
  return created<DlTeam>([&] { return new DlTeam(num_threads); });
}
void dl_team_destroy(DlTeam* team) { delete team; }

DlLinear* dl_linear_create(int32_t format, int64_t n, int64_t k) {
  return created<DlLinear>([&] { return dl::create_linear(format, n, k); });
}
void dl_linear_destroy(DlLinear* linear) { delete linear; }
int64_t dl_linear_bytes(const DlLinear* linear) {
  return static_cast<int64_t>(linear->data.size() + 4 * (linear->column_scales.size() + linear->bias.size()));
}
int32_t dl_linear_pack(DlLinear* linear, int32_t source, const void* data, int64_t rows, int64_t row_bytes,
                       int64_t column0, int64_t stride) {
  return guarded(
      [&] { dl::pack(*linear, source, static_cast<const uint8_t*>(data), rows, row_bytes, column0, stride); });
}
int32_t dl_linear_set_bias(DlLinear* linear, const float* bias) {
  return guarded([&] {
    linear->bias.assign(bias, bias + linear->n);
    linear->bias.resize(static_cast<size_t>(linear->blocks * dl::kLanes), 0.0f);
  });
}
DlLinear* dl_linear_select(const DlLinear* linear, const int64_t* columns, int64_t count) {
  return created<DlLinear>([&] { return dl::select_columns(*linear, columns, count); });
}
int32_t dl_linear_dequantise(const DlLinear* linear, const int64_t* columns, int64_t count, float* out) {
  return guarded([&] {
    for (int64_t i = 0; i < count; i++) {
      dl::require(columns[i] >= 0 && columns[i] < linear->n, "columns: " + std::to_string(columns[i]));
      dl::dequantise_column(*linear, columns[i], out + i * linear->k);
    }
  });
}
int32_t dl_linear_run(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group, const float* x,
                      int64_t rows, float* out) {
  return guarded(
      [&] { dl::run_linear(*linear, team->team, kernels(isa), activation_group, x, rows, out); });
}
int32_t dl_linear_argmax(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group, const float* x,
                         int64_t rows, int64_t* columns) {
  return guarded([&] {
    std::vector<float> best(static_cast<size_t>(rows));
    dl::run_topk(*linear, team->team, kernels(isa), activation_group, x, rows, 1, columns, best.data(), nullptr);
  });
}
int32_t dl_linear_topk(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group, const float* x,
                       int64_t rows, int32_t count, int64_t* columns, float* values, float* lse) {
  return guarded([&] {
    dl::run_topk(*linear, team->team, kernels(isa), activation_group, x, rows, count, columns, values, lse);
  });
}
int32_t dl_linear_residual_blocks(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group,
                                  const float* x, int64_t rows, float* out) {
  return guarded([&] { dl::run_residual_blocks(*linear, team->team, kernels(isa), activation_group, x, rows, out); });
}
int32_t dl_medusa_candidates(const DlLinear* blocks, const DlLinear* lm_head, DlTeam* team, int32_t isa,
                             int32_t activation_group, const float* x, int64_t rows, int32_t heads, int32_t count,
                             const int64_t* target_ids, int64_t* ids, float* log_probabilities) {
  return guarded([&] {
    dl::run_medusa(*blocks, *lm_head, team->team, kernels(isa), activation_group, x, rows, heads, count, target_ids, ids,
                   log_probabilities);
  });
}

int32_t dl_gumbel_topk(DlTeam* team, const float* weights, const int64_t* ids, const int64_t* keys, int64_t rows,
                       int64_t n, int32_t count, int64_t* columns, float* values) {
  return guarded([&] { dl::run_gumbel_topk(team->team, weights, ids, n, keys, rows, n, count, columns, values); });
}

DlPool* dl_pool_create(int64_t num_layers, int64_t num_slots, int64_t num_kv_heads, int64_t head_dim) {
  return created<DlPool>([&] { return new DlPool(num_layers, num_slots, num_kv_heads, head_dim); });
}
void dl_pool_destroy(DlPool* pool) { delete pool; }
int32_t dl_pool_move(DlPool* pool, const int64_t* sources, const int64_t* targets, int64_t count) {
  return guarded([&] { pool->move(sources, targets, count); });
}
int32_t dl_pool_write(DlPool* pool, int64_t layer, const int64_t* slots, int64_t count, const float* keys,
                      const float* values) {
  return guarded([&] {
    check_slots(*pool, layer, slots, count);
    for (int64_t i = 0; i < count * pool->num_kv_heads; i++) {
      pool->write(layer, slots[i / pool->num_kv_heads], i % pool->num_kv_heads, keys + i * pool->head_dim,
                  values + i * pool->head_dim);
    }
  });
}
int32_t dl_pool_read(const DlPool* pool, int64_t layer, const int64_t* slots, int64_t count, float* keys,
                     float* values) {
  return guarded([&] {
    check_slots(*pool, layer, slots, count);
    for (int64_t i = 0; i < count * pool->num_kv_heads; i++) {
      pool->read(layer, slots[i / pool->num_kv_heads], i % pool->num_kv_heads, keys + i * pool->head_dim,
                 values + i * pool->head_dim);
    }
  });
}

DlModel* dl_model_create(const DlModelDesc* desc, const DlDraftInput* draft_input, int32_t isa) {
  return created<DlModel>([&] { return new DlModel(*desc, draft_input, kernels(isa)); });
}
void dl_model_destroy(DlModel* model) { delete model; }
int32_t dl_model_forward(DlModel* model, DlTeam* team, DlPool* pool, const DlBatch* batch, const DlRows* rows) {
  return guarded([&] { model->forward(team->team, *pool, *batch, *rows); });
}
int32_t dl_model_tree(DlModel* model, DlTeam* team, DlPool* pool, const DlTree* tree, const DlTreeOut* out) {
  return guarded([&] { model->run_tree(team->team, *pool, *tree, *out); });
}
