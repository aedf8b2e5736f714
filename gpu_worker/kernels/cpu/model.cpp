#include "model.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "pass.hpp"
#include "scalar.hpp"

using namespace dl;

namespace {

std::string number(int64_t value) { return std::to_string(value); }

void expect_linear(const DlLinear* linear, const std::string& name, int64_t n, int64_t k, int32_t group) {
  require(linear != nullptr && linear->n == n && linear->k == k,
          name + ": not of " + number(n) + " outputs and " + number(k) + " inputs");
  check_group(linear->format, group);
}

}  // namespace

DlModel::DlModel(const DlModelDesc& desc, const DlDraftInput* draft_input, const Kernels& kernels)
    : desc_(desc),
      layers_(desc.layers, desc.layers + desc.num_layers),
      draft_input_(draft_input == nullptr ? std::nullopt : std::make_optional(*draft_input)),
      kernels_(kernels) {
  require(desc.num_layers >= 1, "num_layers: " + number(desc.num_layers));
  require(desc.num_kv_heads >= 1 && desc.num_heads % desc.num_kv_heads == 0 &&
              desc.num_heads / desc.num_kv_heads <= kMaxPairs,
          "num_heads: " + number(desc.num_heads) + " for num_kv_heads " + number(desc.num_kv_heads));
  require(desc.head_dim >= 2 && desc.head_dim <= kMaxHeadDim && desc.head_dim % 2 == 0,
          "head_dim: " + number(desc.head_dim));
  require(desc.rotary_dim >= 0 && desc.rotary_dim % 2 == 0 && desc.rotary_dim <= desc.head_dim,
          "rotary_dim: " + number(desc.rotary_dim));
  check_layers();
  if (draft_input_) check_draft_input();
}

void DlModel::check_layers() const {
  const int64_t q_width = desc_.num_heads * desc_.head_dim, kv_width = desc_.num_kv_heads * desc_.head_dim;
  for (int64_t i = 0; i < desc_.num_layers; i++) {
    const DlLayer& layer = layers_[static_cast<size_t>(i)];
    const auto expect = [&](const DlLinear* linear, const char* name, int64_t n, int64_t k) {
      expect_linear(linear, "layers[" + number(i) + "]." + name, n, k, desc_.activation_group);
    };
    expect(layer.qkv, "qkv", q_width + 2 * kv_width, i == 0 && pairs_enter_qkv() ? 2 * desc_.hidden : desc_.hidden);
    expect(layer.o, "o", desc_.hidden, q_width);
    expect(layer.gate_up, "gate_up", 2 * round_up(desc_.intermediate, kGateColumns), desc_.hidden);
    expect(layer.down, "down", desc_.hidden, desc_.intermediate);
  }
}

void DlModel::check_draft_input() const {
  const DlDraftInput& input = *draft_input_;
  if (input.fuse != nullptr) expect_linear(input.fuse, "fuse", desc_.hidden, input.fuse->k, desc_.activation_group);
  if (input.combine != nullptr) {
    expect_linear(input.combine, "combine", desc_.hidden, 2 * desc_.hidden, desc_.activation_group);
    require(input.residual_is_normed == 0, "residual_is_normed: the residual stream begins with combine's output");
  } else {
    require(layers_[0].attn_norm == nullptr,
            "layers[0].attn_norm: without combine, embedding_norm and feature_norm take its place");
    require(input.residual_is_normed == 0 || input.feature_norm != nullptr, "residual_is_normed: no feature_norm");
  }
}

void DlModel::check(const DlPool& pool, const DlBatch& batch, const DlRows& rows) const {
  require(pool.num_kv_heads == desc_.num_kv_heads && pool.head_dim == desc_.head_dim &&
              pool.num_layers >= desc_.num_layers,
          "pool: " + number(pool.num_layers) + " layers of " + number(pool.num_kv_heads) + " heads of " +
              number(pool.head_dim) + " do not fit the model");
  require(draft_input_.has_value() == (rows.features != nullptr), "features: are for draft heads, which need them");
  for (int32_t i = 0; i < rows.num_captured; i++) {
    require(rows.captured_layers[i] >= 0 && rows.captured_layers[i] < desc_.num_layers,
            "capture: " + number(rows.captured_layers[i]) + " is not in 0.." + number(desc_.num_layers - 1));
  }
  for (int64_t row = 0; row < batch.qo_indptr[batch.num_requests]; row++) {
    require(batch.input_ids[row] >= 0 && batch.input_ids[row] < desc_.vocab,
            "input_ids: " + number(batch.input_ids[row]) + " is not in 0.." + number(desc_.vocab - 1));
    require(batch.positions[row] >= 0 && batch.positions[row] < desc_.num_positions,
            "positions: " + number(batch.positions[row]) + " is not in 0.." + number(desc_.num_positions - 1));
  }
}

void DlModel::forward(Team& team, const DlPool& pool, const DlBatch& batch, const DlRows& rows) {
  plan_.build(batch, pool, desc_.num_heads, team.size());
  check(pool, batch, rows);
  if (plan_.num_rows() == 0) return;
  batch_ = &batch;
  workspace_.reserve(desc_, draft_input_ ? &*draft_input_ : nullptr, kernels_, plan_, pool, team.size());
  struct Call {
    DlModel* model;
    const DlPool* pool;
    int threads;
    const DlRows* rows;
  } call{this, &pool, team.size(), &rows};
  team.run(
      [](void* argument, Worker& worker) {
        const auto* c = static_cast<Call*>(argument);
        Pass(*c->model, worker, *c->pool, c->threads, *c->rows).run();
      },
      &call);
}

void DlModel::embed(int64_t row, float* to) const {
  const int64_t id = batch_->input_ids[row], hidden = desc_.hidden;
  if (desc_.table == DL_TABLE_LINEAR) {
    dequantise_column(*static_cast<const DlLinear*>(desc_.embedding), id, to);
  } else if (desc_.table == DL_TABLE_FLOAT32) {
    std::copy_n(static_cast<const float*>(desc_.embedding) + id * hidden, hidden, to);
  } else {
    const auto* from = static_cast<const uint16_t*>(desc_.embedding) + id * hidden;
    const auto convert = desc_.table == DL_TABLE_BF16 ? bf16_to_float : f16_to_float;
    for (int64_t i = 0; i < hidden; i++) to[i] = convert(from[i]);
  }
}
