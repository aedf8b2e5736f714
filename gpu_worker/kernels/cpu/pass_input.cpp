// What enters the layers: the embedding, or what a draft head makes of it and of a feature row.
#include <algorithm>

#include "pass.hpp"

using namespace dl;

const float* DlModel::Pass::make_input() {
  if (model_.draft_input_) return make_draft_input();
  float* residual = workspace_.residual(0);
  worker_.phase(rows_, [&](int64_t row) { model_.embed(row, residual + row * hidden_); });
  return residual;
}

const float* DlModel::Pass::fuse_features() {
  const DlDraftInput& input = *model_.draft_input_;
  if (input.fuse == nullptr || data_.recycled != 0) return data_.features;
  const LinearWork fuse(*input.fuse, rows_);
  const float* features = data_.features;
  float* fused = workspace_.fused.as<float>();
  product_phase(
      *input.fuse, fuse.items(),
      [&](int64_t row, const Activations& to) {
        kernels_.quantise(features + row * input.fuse->k, 0, input.fuse->k, to, row);
      },
      [&](int64_t item, const Activations& x) { fuse.run(kernels_, x, nullptr, fused, hidden_, item); }, [] {});
  return fused;
}

const float* DlModel::Pass::make_draft_input() {
  const DlDraftInput& input = *model_.draft_input_;
  features_ = fuse_features();
  float* residual = workspace_.residual(0);
  if (input.combine != nullptr) {
    const LinearWork combine(*input.combine, rows_);
    product_phase(
        *input.combine, combine.items(), [&](int64_t row, const Activations& to) { pair(row, to); },
        [&](int64_t item, const Activations& x) { combine.run(kernels_, x, nullptr, residual, hidden_, item); },
        [] {});
    return residual;
  }
  if (input.residual_is_normed == 0) return features_;
  worker_.phase(rows_, [&](int64_t row) {
    kernels_.rms_norm(features_ + row * hidden_, input.feature_norm, desc_.eps, hidden_, residual + row * hidden_);
  });
  return residual;
}

void DlModel::Pass::pair(int64_t row, const Activations& to) const {
  const DlDraftInput& input = *model_.draft_input_;
  const float* features = features_ + row * hidden_;
  kernels_.will_read(features, hidden_ * 4);
  float* both = workspace_.normed(worker_.thread());
  float* embedding_to = both + (input.embedding_first != 0 ? 0 : hidden_);
  float* features_to = both + (input.embedding_first != 0 ? hidden_ : 0);
  model_.embed(row, embedding_to);
  if (input.embedding_norm != nullptr) {
    kernels_.rms_norm(embedding_to, input.embedding_norm, desc_.eps, hidden_, embedding_to);
  }
  if (input.feature_norm != nullptr) {
    kernels_.rms_norm(features, input.feature_norm, desc_.eps, hidden_, features_to);
  } else {
    std::copy_n(features, hidden_, features_to);
  }
  kernels_.quantise(both, 0, 2 * hidden_, to, row);
}
