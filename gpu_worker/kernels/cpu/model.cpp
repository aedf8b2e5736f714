#include "model.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "scalar.hpp"

namespace dl {

namespace {

// Rows whose activations stay in the second-level cache while a block of columns passes over them.
constexpr int64_t kChunkRows = 256;
// Columns of gate and of up per item: one slab of the next linear's inputs.
constexpr int64_t kGateColumns = 64;
// Rows per pass over an item's gate and up weights: bounds its scratch.
constexpr int64_t kGateRows = 48;
// Rows that one thread norms faster than several threads can agree to share them.
constexpr int64_t kFewRows = 4;
constexpr int64_t kFetchedRows = 16;

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

void check_group(int32_t format, int32_t group) {
  require(group == 32 || group == 64, "activation_group: " + number(group) + " is neither 32 nor 64");
  require(format != DL_W8 || group == 64, "activation_group: weights W8 need groups of 64, not " + number(group));
}

Activations ActivationBuffer::reserve(int64_t rows, int64_t k, int32_t format, int32_t group,
                                      const Kernels& kernels) {
  Activations x{};
  x.kp = round_up(k, kSlab);
  x.group = group;
  x.as_pairs = format == DL_BF16;
  const int64_t inputs = rows * x.kp;
  if (x.as_pairs) {
    memory_.reserve(static_cast<size_t>(inputs / 2 * kernels.pair_bytes));
    x.pairs = memory_.data();
    return x;
  }
  memory_.reserve(static_cast<size_t>(inputs + 3 * inputs / 32 * 4));
  x.q = memory_.as<int8_t>();
  x.scales = reinterpret_cast<float*>(x.q + inputs);
  x.sums = x.scales + inputs / 32;
  x.offsets = reinterpret_cast<int32_t*>(x.sums + inputs / 32);
  return x;
}

LinearWork::LinearWork(const DlLinear& linear, int64_t num_rows)
    : view(linear.view()), rows(num_rows), blocks(linear.blocks), chunks(ceil_div(num_rows, kChunkRows)) {}

void LinearWork::run(const Kernels& kernels, const Activations& x, float* out, int64_t out_stride, Epilogue epilogue,
                     int64_t item) const {
  const int64_t chunk = item / blocks, block = item % blocks;
  const int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
  kernels.linear(view, block, block + 1, x, begin, end - begin, out + begin * out_stride + block * kLanes, out_stride,
                 epilogue);
}

}  // namespace dl

using namespace dl;

DlModel::DlModel(const DlModelDesc& desc, const Kernels& kernels)
    : desc_(desc), layers_(desc.layers, desc.layers + desc.num_layers), kernels_(kernels) {
  require(desc.num_layers >= 1, "num_layers: " + number(desc.num_layers));
  require(desc.num_kv_heads >= 1 && desc.num_heads % desc.num_kv_heads == 0 &&
              desc.num_heads / desc.num_kv_heads <= kMaxPairs,
          "num_heads: " + number(desc.num_heads) + " for num_kv_heads " + number(desc.num_kv_heads));
  require(desc.head_dim >= 2 && desc.head_dim <= 512 && desc.head_dim % 2 == 0, "head_dim: " + number(desc.head_dim));
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

void DlModel::reserve(int64_t rows, int threads, const DlPool& pool) {
  const auto floats = [rows](int64_t width) { return static_cast<size_t>(rows * width) * 4; };
  const int64_t q_width = desc_.num_heads * desc_.head_dim;
  rows_ = rows;
  threads_ = threads;
  residual_.reserve(floats(desc_.hidden));
  normed_.reserve(floats(desc_.hidden));
  qkv_.reserve(floats(q_width + 2 * desc_.num_kv_heads * desc_.head_dim));
  attended_.reserve(floats(q_width));
  queries_.reserve(static_cast<size_t>(rows * q_width / 2 * kernels_.pair_bytes));
  gated_.reserve(static_cast<size_t>(threads * kGateRows * 3 * kGateColumns) * 4);
  partials_.reserve(plan_.num_partials(), pool.padded);
  scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(threads)));
  for (auto& scratch : scratch_) scratch.reserve(kernels_, pool);
}

void DlModel::forward(Team& team, const DlPool& pool, const DlBatch& batch, float* hidden_out) {
  plan_.build(batch, pool, desc_.num_heads, team.size());
  check(pool, batch);
  const int64_t rows = plan_.num_rows();
  if (rows == 0) return;
  batch_ = &batch;
  reserve(rows, team.size(), pool);
  // Buffers of the layers' inputs grow here, not in the threads.
  for (const DlLayer& layer : layers_) {
    qkv_input_.reserve(rows, layer.qkv->k, layer.qkv->format, desc_.activation_group, kernels_);
    o_input_.reserve(rows, layer.o->k, layer.o->format, desc_.activation_group, kernels_);
    mlp_input_.reserve(rows, layer.gate_up->k, layer.gate_up->format, desc_.activation_group, kernels_);
    down_input_.reserve(rows, layer.down->k, layer.down->format, desc_.activation_group, kernels_);
  }
  struct Call {
    DlModel* model;
    const DlPool* pool;
    float* hidden_out;
  } call{this, &pool, hidden_out};
  team.run(
      [](void* argument, Worker& worker) {
        auto* c = static_cast<Call*>(argument);
        c->model->work(worker, *c->pool, c->hidden_out);
      },
      &call);
}

// The pass as every thread walks it. Steps over few rows are not worth a phase of their own: the thread that ends the
// phase before them does them at once, while the others would only wait for each other twice.
void DlModel::work(Worker& worker, const DlPool& pool, float* hidden_out) {
  const int64_t hidden = desc_.hidden, rows = rows_, q_width = desc_.num_heads * desc_.head_dim;
  const int64_t qkv_width = q_width + 2 * desc_.num_kv_heads * desc_.head_dim;
  const int32_t group = desc_.activation_group;
  float* residual = residual_.as<float>();
  float* normed = normed_.as<float>();
  float* gate_scratch = gated_.as<float>() + worker.thread() * kGateRows * 3 * kGateColumns;
  const auto norm_and_quantise = [&](int64_t row, const float* weight, const Activations& to) {
    const float* next = residual + std::min(row + 1, rows - 1) * hidden;
    for (int64_t i = 0; i < hidden; i += kLanes) __builtin_prefetch(next + i);
    kernels_.rms_norm(residual + row * hidden, weight, desc_.eps, hidden, normed + row * hidden);
    kernels_.quantise(normed + row * hidden, 0, hidden, to, row);
  };
  const auto final_norm = [&](int64_t row) {
    kernels_.rms_norm(residual + row * hidden, desc_.final_norm, desc_.eps, hidden, hidden_out + row * hidden);
  };
  // fn(item) for n items, then each(row) for all rows.
  const auto phase_then_rows = [&](int64_t n, auto&& fn, auto&& each) {
    const bool at_once = rows <= kFewRows;
    worker.phase(n, fn, [&] {
      for (int64_t row = 0; at_once && row < rows; row++) each(row);
    });
    if (!at_once) worker.phase(rows, each);
  };

  const auto first_norm = [&](int64_t index) {
    const DlLayer& layer = layers_[static_cast<size_t>(index)];
    const Activations to = qkv_input_.reserve(rows, hidden, layer.qkv->format, group, kernels_);
    return [&norm_and_quantise, &layer, to](int64_t row) { norm_and_quantise(row, layer.attn_norm, to); };
  };
  phase_then_rows(rows, [&](int64_t row) { embed(row); }, first_norm(0));
  for (int64_t index = 0; index < desc_.num_layers; index++) {
    const DlLayer& layer = layers_[static_cast<size_t>(index)];
    const Activations qkv_in = qkv_input_.reserve(rows, hidden, layer.qkv->format, group, kernels_);
    const Activations o_in = o_input_.reserve(rows, q_width, layer.o->format, group, kernels_);
    const Activations mlp_in = mlp_input_.reserve(rows, hidden, layer.gate_up->format, group, kernels_);
    const Activations down_in = down_input_.reserve(rows, desc_.intermediate, layer.down->format, group, kernels_);

    const LinearWork qkv(*layer.qkv, rows);
    const auto run_qkv = [&](int64_t item) {
      qkv.run(kernels_, qkv_in, qkv_.as<float>(), qkv_width, Epilogue::kStore, item);
    };
    const auto& joint = plan_.joint_rows();
    const auto num_rotations = static_cast<int64_t>(joint.size()) * desc_.num_kv_heads;
    const auto rotate_one = [&](int64_t i) {
      rotate(pool, index, joint[static_cast<size_t>(i / desc_.num_kv_heads)], i % desc_.num_kv_heads);
    };
    const bool few_rotations = joint.size() == 1;
    fetch(qkv_in);
    worker.phase(qkv.items(), run_qkv, [&] {
      for (int64_t i = 0; few_rotations && i < num_rotations; i++) rotate_one(i);
    });
    if (!few_rotations && num_rotations > 0) worker.phase(num_rotations, rotate_one);
    attend(worker, pool, index, o_in);
    fetch(o_in);
    const LinearWork o(*layer.o, rows);
    phase_then_rows(
        o.items(), [&](int64_t item) { o.run(kernels_, o_in, residual, hidden, Epilogue::kAdd, item); },
        [&](int64_t row) { norm_and_quantise(row, layer.mlp_norm, mlp_in); });
    fetch(mlp_in);
    worker.phase(ceil_div(desc_.intermediate, kGateColumns) * ceil_div(rows, kChunkRows),
                 [&](int64_t item) { gate_up(layer, mlp_in, down_in, item, gate_scratch); });
    const LinearWork down(*layer.down, rows);
    fetch(down_in);
    const auto run_down = [&](int64_t item) { down.run(kernels_, down_in, residual, hidden, Epilogue::kAdd, item); };
    if (index + 1 < desc_.num_layers) {
      phase_then_rows(down.items(), run_down, first_norm(index + 1));
    } else {
      phase_then_rows(down.items(), run_down, final_norm);
    }
  }
}

void DlModel::attend(Worker& worker, const DlPool& pool, int64_t layer, const Activations& to) {
  const LayerAttention attention(plan_, kernels_, pool, layer, desc_.num_heads, queries_.data(), partials_,
                                 attended_.as<float>());
  AttentionScratch& scratch = scratch_[static_cast<size_t>(worker.thread())];
  worker.phase_in_order(static_cast<int64_t>(plan_.items().size()),
                        [&](int64_t i) {
                          const AttentionItem& item = plan_.items()[static_cast<size_t>(i)];
                          const RowTile& tile = plan_.tile(item.tile);
                          for (int64_t r = 0; tile.alone && r < tile.rows; r++) {
                            rotate(pool, layer, tile.row0 + r, item.kv_head);
                          }
                          attention.run(i, i + threads_, scratch, to);
                        });
  if (plan_.num_partials() > 0) {
    worker.phase(rows_ * desc_.num_kv_heads, [&](int64_t i) {
      attention.merge(i / desc_.num_kv_heads, i % desc_.num_kv_heads, scratch, to);
    });
  }
  if (!LayerAttention::aligned(desc_.num_heads, pool)) {
    const int64_t width = desc_.num_heads * desc_.head_dim;
    worker.phase(rows_, [&](int64_t row) { kernels_.quantise(row_of(attended_, row, width), 0, width, to, row); });
  }
}

void DlModel::fetch(const Activations& x) const {
  if (rows_ > kFetchedRows) return;
  const auto lines = [](const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(p) + i);
  };
  const int64_t inputs = rows_ * x.kp;
  if (x.as_pairs) return lines(x.pairs, inputs / 2 * kernels_.pair_bytes);
  lines(x.q, inputs + 3 * inputs / 32 * 4);  // scales, sums and offsets follow
}

void DlModel::embed(int64_t row) const {
  const int64_t id = batch_->input_ids[row], hidden = desc_.hidden;
  float* to = residual_.as<float>() + row * hidden;
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

// Rotates the query heads of one KV head, and its key; stores key and value in the row's slot.
void DlModel::rotate(const DlPool& pool, int64_t layer, int64_t row, int64_t kv_head) const {
  const int64_t d = desc_.head_dim, repeats = desc_.num_heads / desc_.num_kv_heads;
  const float* qkv = row_of(qkv_, row, (desc_.num_heads + 2 * desc_.num_kv_heads) * d);
  const int64_t half = desc_.rotary_dim / 2, position = batch_->positions[row];
  const DlLayer& weights = layers_[static_cast<size_t>(layer)];
  // The parts of a row were computed by several cores: all their lines are asked for before the first is needed.
  for (const int64_t first : {kv_head * repeats, desc_.num_heads + kv_head,
                              desc_.num_heads + desc_.num_kv_heads + kv_head}) {
    const int64_t heads = first == kv_head * repeats ? repeats : 1;
    for (int64_t i = 0; i < heads * d; i += kLanes) __builtin_prefetch(qkv + first * d + i);
  }
  RotaryHead head{weights.q_norm, desc_.eps, d, desc_.rotary_dim, desc_.cos + position * half,
                  desc_.sin + position * half};
  constexpr float kLog2E = 1.44269504088896341f;  // attention works with powers of two
  for (int64_t h = kv_head * repeats; h < (kv_head + 1) * repeats; h++) {
    uint8_t* to = queries_.data() + (row * desc_.num_heads + h) * (d / 2) * kernels_.pair_bytes;
    kernels_.rotate_query(qkv + h * d, head, desc_.attn_scale * kLog2E, to);
  }
  float key[512];
  head.norm = weights.k_norm;
  kernels_.rotate_key(qkv + (desc_.num_heads + kv_head) * d, head, key);
  pool.write(layer, batch_->out_slots[row], kv_head, key,
             qkv + (desc_.num_heads + desc_.num_kv_heads + kv_head) * d);
}

// 64 columns of silu(gate) * up for a chunk of rows, quantised as inputs of the down projection.
void DlModel::gate_up(const DlLayer& layer, const Activations& x, const Activations& to, int64_t item,
                      float* scratch) const {
  const int64_t groups = ceil_div(desc_.intermediate, kGateColumns), chunks = ceil_div(rows_, kChunkRows);
  const int64_t chunk = item / groups, column = item % groups * kGateColumns;
  const int64_t begin = rows_ * chunk / chunks, end = rows_ * (chunk + 1) / chunks;
  const WeightView view = layer.gate_up->view();
  const int64_t columns = std::min(kGateColumns, desc_.intermediate - column), block = column / kLanes * 2;
  const int64_t width = 2 * kGateColumns;
  float* gated = scratch + kGateRows * width;
  for (int64_t row0 = begin; row0 < end; row0 += kGateRows) {
    const int64_t count = std::min(kGateRows, end - row0);
    kernels_.linear(view, block, block + width / kLanes, x, row0, count, scratch, width, Epilogue::kStore);
    for (int64_t r = 0; r < count; r++) {
      const float* both = scratch + r * width;  // blocks of 16 in turn: gate, up
      for (int64_t c = 0; c < kGateColumns; c += kLanes) {
        kernels_.silu_mul(both + 2 * c, both + 2 * c + kLanes, kLanes, gated + c);
      }
      kernels_.quantise(gated, column, columns, to, row0 + r);
    }
  }
}
