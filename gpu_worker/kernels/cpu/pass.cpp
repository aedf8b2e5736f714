#include "pass.hpp"

#include <algorithm>

using namespace dl;

namespace {

// Rows whose shared activations are asked for all at once.
constexpr int64_t kFetchedRows = 16;

}  // namespace

DlModel::Pass::Pass(DlModel& model, Worker& worker, const DlPool& pool, int threads, const DlRows& data)
    : model_(model),
      worker_(worker),
      pool_(pool),
      threads_(threads),
      data_(data),
      desc_(model.desc_),
      kernels_(model.kernels_),
      plan_(model.plan_),
      workspace_(model.workspace_),
      rows_(model.plan_.num_rows()),
      hidden_(desc_.hidden),
      q_width_(desc_.num_heads * desc_.head_dim),
      qkv_width_(q_width_ + 2 * desc_.num_kv_heads * desc_.head_dim),
      group_(desc_.activation_group) {}

void DlModel::Pass::fetch_ahead(int64_t layer) {
  const auto& tiles = plan_.likely_tiles(worker_.thread());
  if (tiles.empty() || layer == desc_.num_layers) return;
  int64_t slabs = 0;
  const DlLayer& weights = model_.layers_[static_cast<size_t>(layer)];
  for (const DlLinear* linear : {weights.qkv, weights.o, weights.gate_up, weights.down}) {
    slabs += linear->blocks * linear->slabs;
  }
  const int64_t steps = std::max<int64_t>(1, slabs * ceil_div(rows_, kernels_.tile_rows) / threads_);
  const int64_t bytes = static_cast<int64_t>(tiles.size()) * pool_.tile_bytes;
  background_ = {tiles.data(), tiles.data() + tiles.size(), layer * pool_.layer_bytes, pool_.tile_bytes, 0,
                 ceil_div(bytes / 64, steps)};
}

Activations DlModel::Pass::fetching(Activations x) {
  x.background = &background_;
  return x;
}

void DlModel::Pass::run() {
  const auto nothing = [] {};
  fetch_ahead(0);
  const float* before = make_input();
  for (int64_t index = 0; index < desc_.num_layers; index++) {
    const DlLayer& layer = model_.layers_[static_cast<size_t>(index)];
    float* between = workspace_.residual(2 * index + 1);
    float* after = workspace_.residual(2 * index + 2);

    const LinearWork qkv(*layer.qkv, rows_);
    const auto& joint = plan_.joint_rows();
    const auto num_rotations = static_cast<int64_t>(joint.size()) * desc_.num_kv_heads;
    const auto rotate_one = [&](int64_t i) {
      rotate(index, joint[static_cast<size_t>(i / desc_.num_kv_heads)], i % desc_.num_kv_heads);
    };
    const bool at_once = joint.size() == 1;  // not worth a phase of its own
    const bool from_pairs = index == 0 && model_.pairs_enter_qkv();
    product_phase(
        *layer.qkv, qkv.items(),
        [&](int64_t row, const Activations& to) {
          if (from_pairs) return pair(row, to);
          norm(before, layer.attn_norm, row, to);
        },
        [&](int64_t item, const Activations& x) {
          qkv.run(kernels_, x, nullptr, workspace_.qkv(index), qkv_width_, item);
        },
        [&] {
          for (int64_t i = 0; at_once && i < num_rotations; i++) rotate_one(i);
        });
    if (!at_once && num_rotations > 0) worker_.phase(num_rotations, rotate_one);

    const Activations o_in = fetching(workspace_.o_input.at(index, q_width_, layer.o->format, group_));
    attend(index, o_in);
    fetch_ahead(index + 1);
    will_read(o_in);
    const LinearWork o(*layer.o, rows_);
    worker_.phase(o.items(), [&](int64_t item) { o.run(kernels_, o_in, before, between, hidden_, item); });

    const Activations down_in = fetching(workspace_.down_input.at(index, desc_.intermediate, layer.down->format, group_));
    product_phase(
        *layer.gate_up, ceil_div(desc_.intermediate, kGateColumns) * RowChunks(rows_).count,
        [&](int64_t row, const Activations& to) { norm(between, layer.mlp_norm, row, to); },
        [&](int64_t item, const Activations& x) { gate_up(layer, x, down_in, item); }, nothing);
    will_read(down_in);
    const LinearWork down(*layer.down, rows_);
    worker_.phase(down.items(), [&](int64_t item) {
      down.run(kernels_, down_in, between, after, hidden_, item);
      capture(index, down, item, after);
    });
    before = after;
  }
  worker_.phase(rows_, [&](int64_t row) { put_out(row, before + row * hidden_); });
}

void DlModel::Pass::capture(int64_t layer, const LinearWork& work, int64_t item, const float* residual) const {
  const int64_t chunk = item / work.blocks, column = item % work.blocks * kLanes;
  const int64_t columns = std::min(kLanes, hidden_ - column), width = data_.num_captured * hidden_;
  for (int64_t i = 0; i < data_.num_captured; i++) {
    if (data_.captured_layers[i] != layer) continue;
    for (int64_t row = work.chunks.begin(chunk); row < work.chunks.end(chunk); row++) {
      std::copy_n(residual + row * hidden_ + column, columns, data_.captured_out + row * width + i * hidden_ + column);
    }
  }
}

void DlModel::Pass::put_out(int64_t row, const float* residual) const {
  float* hidden = data_.hidden_out + row * hidden_;
  if (desc_.final_norm == nullptr) {
    std::copy_n(residual, hidden_, hidden);
  } else {
    kernels_.rms_norm(residual, desc_.final_norm, desc_.eps, hidden_, hidden);
  }
  if (data_.residual_out != nullptr) std::copy_n(residual, hidden_, data_.residual_out + row * hidden_);
}

void DlModel::Pass::norm(const float* residual, const float* weight, int64_t row, const Activations& to) const {
  const float* x = residual + row * hidden_;
  kernels_.will_read(x, hidden_ * 4);
  if (weight == nullptr) return kernels_.quantise(x, 0, hidden_, to, row);
  float* normed = workspace_.normed(worker_.thread());
  kernels_.rms_norm(x, weight, desc_.eps, hidden_, normed);
  kernels_.quantise(normed, 0, hidden_, to, row);
}

void DlModel::Pass::attend(int64_t layer, const Activations& to) {
  float* attended = workspace_.attended.as<float>();
  const LayerAttention attention(plan_, kernels_, pool_, layer, desc_.num_heads, workspace_.queries.data(),
                                 workspace_.partials(layer), attended);
  AttentionScratch& scratch = workspace_.attention(worker_.thread());
  const int64_t width = desc_.num_heads / desc_.num_kv_heads * desc_.head_dim;
  const bool by_head = LayerAttention::aligned(desc_.num_heads, pool_);
  worker_.phase_in_order(static_cast<int64_t>(plan_.items().size()), [&](int64_t i) {
    const AttentionItem& item = plan_.items()[static_cast<size_t>(i)];
    const RowTile& tile = plan_.tile(item.tile);
    for (int64_t row = tile.row0; row < tile.row0 + tile.rows; row++) {
      if (by_head && tile.partial < 0) will_write(to, row, item.kv_head * width, width);
      if (tile.alone) rotate(layer, row, item.kv_head);
    }
    attention.run(i, i + threads_, scratch, to);
  });
  if (plan_.num_partials() > 0) {
    worker_.phase(rows_ * desc_.num_kv_heads, [&](int64_t i) {
      if (by_head) will_write(to, i / desc_.num_kv_heads, i % desc_.num_kv_heads * width, width);
      attention.merge(i / desc_.num_kv_heads, i % desc_.num_kv_heads, scratch, to);
    });
  }
  if (!by_head) {
    worker_.phase(rows_, [&](int64_t row) { kernels_.quantise(attended + row * q_width_, 0, q_width_, to, row); });
  }
}

// Rotates the query heads of one KV head, and its key; stores key and value in the row's slot.
void DlModel::Pass::rotate(int64_t layer, int64_t row, int64_t kv_head) const {
  const int64_t d = desc_.head_dim, repeats = desc_.num_heads / desc_.num_kv_heads;
  const float* qkv = workspace_.qkv(layer) + row * qkv_width_;
  const float* queries = qkv + kv_head * repeats * d;
  const float* key = qkv + (desc_.num_heads + kv_head) * d;
  const float* value = key + desc_.num_kv_heads * d;
  // Several cores computed them: all lines are asked for before the first is needed.
  kernels_.will_read(queries, repeats * d * 4);
  kernels_.will_read(key, d * 4);
  kernels_.will_read(value, d * 4);
  const DlLayer& weights = model_.layers_[static_cast<size_t>(layer)];
  const int64_t angles = model_.batch_->positions[row] * desc_.rotary_dim / 2;
  RotaryHead head{weights.q_norm, desc_.eps, d, desc_.rotary_dim, desc_.cos + angles, desc_.sin + angles};
  constexpr float kLog2E = 1.44269504088896341f;  // attention works with powers of two
  for (int64_t h = 0; h < repeats; h++) {
    const int64_t at = (row * desc_.num_heads + kv_head * repeats + h) * (d / 2) * kernels_.pair_bytes;
    kernels_.rotate_query(queries + h * d, head, desc_.attn_scale * kLog2E, workspace_.queries.data() + at);
  }
  float rotated[kMaxHeadDim];
  head.norm = weights.k_norm;
  kernels_.rotate_key(key, head, rotated);
  pool_.write(layer, model_.batch_->out_slots[row], kv_head, rotated, value);
}

// 64 columns of silu(gate) * up for a chunk of rows, quantised as inputs of the down projection.
void DlModel::Pass::gate_up(const DlLayer& layer, const Activations& x, const Activations& to, int64_t item) const {
  const int64_t groups = ceil_div(desc_.intermediate, kGateColumns);
  const RowChunks chunks(rows_);
  const int64_t chunk = item / groups, column = item % groups * kGateColumns;
  const WeightView view = layer.gate_up->view();
  const int64_t columns = std::min(kGateColumns, desc_.intermediate - column), block = column / kLanes * 2;
  const int64_t width = 2 * kGateColumns;
  float* both = workspace_.gate(worker_.thread());
  float* gated = both + kGateRows * width;
  for (int64_t row0 = chunks.begin(chunk); row0 < chunks.end(chunk); row0 += kGateRows) {
    const int64_t count = std::min(kGateRows, chunks.end(chunk) - row0);
    for (int64_t r = 0; r < count; r++) will_write(to, row0 + r, column, kGateColumns);
    kernels_.linear(view, block, block + width / kLanes, x, row0, count, nullptr, both, width);
    for (int64_t r = 0; r < count; r++) {
      const float* row = both + r * width;  // blocks of 16 in turn: gate, up
      for (int64_t c = 0; c < kGateColumns; c += kLanes) {
        kernels_.silu_mul(row + 2 * c, row + 2 * c + kLanes, kLanes, gated + c);
      }
      kernels_.quantise(gated, column, columns, to, row0 + r);
    }
  }
}

void DlModel::Pass::will_read(const Activations& x) const {
  if (rows_ > kFetchedRows) return;
  const int64_t inputs = rows_ * x.kp;
  if (x.as_pairs) return kernels_.will_read(x.pairs, inputs / 2 * kernels_.pair_bytes);
  kernels_.will_read(x.q, inputs + 3 * inputs / kHalf * 4);  // scales, sums and offsets follow
}

void DlModel::Pass::will_write(const Activations& to, int64_t row, int64_t k0, int64_t n) const {
  if (rows_ > kFetchedRows) return;
  const int64_t at = row * to.kp + k0;
  if (to.as_pairs) return kernels_.will_write(to.pairs + at / 2 * kernels_.pair_bytes, n / 2 * kernels_.pair_bytes);
  kernels_.will_write(to.q + at, n);
  kernels_.will_write(to.scales + at / kHalf, n / kHalf * 4);
  kernels_.will_write(to.sums + at / kHalf, n / kHalf * 4);
  kernels_.will_write(to.offsets + at / kHalf, n / kHalf * 4);
}
