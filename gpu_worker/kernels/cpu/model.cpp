#include "model.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "pass.hpp"
#include "scalar.hpp"

using namespace dl;

namespace {

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

DlModel::DlModel(const DlModelDesc& desc, const Kernels& kernels)
    : desc_(desc), layers_(desc.layers, desc.layers + desc.num_layers), kernels_(kernels) {
  require(desc.num_layers >= 1, "num_layers: " + number(desc.num_layers));
  require(desc.num_kv_heads >= 1 && desc.num_heads % desc.num_kv_heads == 0 &&
              desc.num_heads / desc.num_kv_heads <= kMaxPairs,
          "num_heads: " + number(desc.num_heads) + " for num_kv_heads " + number(desc.num_kv_heads));
  require(desc.head_dim >= 2 && desc.head_dim <= kMaxHeadDim && desc.head_dim % 2 == 0,
          "head_dim: " + number(desc.head_dim));
  require(desc.rotary_dim >= 0 && desc.rotary_dim % 2 == 0 && desc.rotary_dim <= desc.head_dim,
          "rotary_dim: " + number(desc.rotary_dim));
  const int64_t q_width = desc.num_heads * desc.head_dim, kv_width = desc.num_kv_heads * desc.head_dim;
  for (int64_t i = 0; i < desc.num_layers; i++) {
    const DlLayer& layer = layers_[static_cast<size_t>(i)];
    const auto expect = [i](const DlLinear* linear, const char* name, int64_t n, int64_t k) {
      require(linear != nullptr && linear->n == n && linear->k == k,
              "layers[" + number(i) + "]." + name + ": not of " + number(n) + " outputs and " + number(k) + " inputs");
    };
    expect(layer.qkv, "qkv", q_width + 2 * kv_width, desc.hidden);
    expect(layer.o, "o", desc.hidden, q_width);
    expect(layer.gate_up, "gate_up", 2 * round_up(desc.intermediate, kGateColumns), desc.hidden);
    expect(layer.down, "down", desc.hidden, desc.intermediate);
    for (const DlLinear* linear : {layer.qkv, layer.o, layer.gate_up, layer.down}) {
      check_group(linear->format, desc.activation_group);
    }
  }
}

void DlModel::check(const DlPool& pool, const DlBatch& batch) const {
  require(pool.num_kv_heads == desc_.num_kv_heads && pool.head_dim == desc_.head_dim &&
              pool.num_layers >= desc_.num_layers,
          "pool: " + number(pool.num_layers) + " layers of " + number(pool.num_kv_heads) + " heads of " +
              number(pool.head_dim) + " do not fit the model");
  for (int64_t row = 0; row < batch.qo_indptr[batch.num_requests]; row++) {
    require(batch.input_ids[row] >= 0 && batch.input_ids[row] < desc_.vocab,
            "input_ids: " + number(batch.input_ids[row]) + " is not in 0.." + number(desc_.vocab - 1));
    require(batch.positions[row] >= 0 && batch.positions[row] < desc_.num_positions,
            "positions: " + number(batch.positions[row]) + " is not in 0.." + number(desc_.num_positions - 1));
  }
}

void DlModel::forward(Team& team, const DlPool& pool, const DlBatch& batch, float* hidden_out) {
  plan_.build(batch, pool, desc_.num_heads, team.size());
  check(pool, batch);
  if (plan_.num_rows() == 0) return;
  batch_ = &batch;
  workspace_.reserve(desc_, kernels_, plan_, pool, team.size());
  struct Call {
    DlModel* model;
    const DlPool* pool;
    int threads;
    float* hidden_out;
  } call{this, &pool, team.size(), hidden_out};
  team.run(
      [](void* argument, Worker& worker) {
        const auto* c = static_cast<Call*>(argument);
        Pass(*c->model, worker, *c->pool, c->threads, c->hidden_out).run();
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
