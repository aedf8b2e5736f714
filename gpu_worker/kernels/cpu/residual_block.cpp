#include "residual_block.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "linear_work.hpp"
#include "workspace.hpp"

namespace dl {

namespace {

struct Call {
  const DlLinear& linear;
  const Kernels& kernels;
  const LinearWork work;
  const Activations input;
  const float* x;
  const int64_t rows;
  float* y;

  void run(Worker& worker) const {
    const int64_t k = linear.k;
    worker.phase(rows, [&](int64_t row) { kernels.quantise(x + row * k, 0, k, input, row); });
    worker.phase(work.items(), [&](int64_t item) {
      work.run(kernels, input, nullptr, y, linear.n, item);
      finish(item);
    });
  }

  // The activation and the sum for an item's columns, on the thread that computed them.
  void finish(int64_t item) const {
    float ones[kLanes], products[kLanes] = {}, activated[kLanes];
    std::fill_n(ones, kLanes, 1.0f);
    const int64_t chunk = item / work.blocks, column = item % work.blocks * kLanes;
    const int64_t columns = std::min(kLanes, linear.n - column);
    for (int64_t row = work.chunks.begin(chunk); row < work.chunks.end(chunk); row++) {
      float* out = y + row * linear.n + column;
      std::copy_n(out, columns, products);
      kernels.silu_mul(products, ones, kLanes, activated);
      for (int64_t c = 0; c < columns; c++) out[c] = x[row * linear.k + (column + c) % linear.k] + activated[c];
    }
  }
};

}  // namespace

void run_residual_blocks(const DlLinear& linear, Team& team, const Kernels& kernels, int32_t group, const float* x,
                         int64_t rows, float* y) {
  check_group(linear.format, group);
  require(linear.n % linear.k == 0, "linear: " + std::to_string(linear.n) + " outputs are no multiple of its " +
                                        std::to_string(linear.k) + " inputs");
  if (rows == 0) return;
  ActivationRing ring;
  ring.reserve(1, rows, linear.k, kernels);
  Call call{linear, kernels, LinearWork(linear, rows), ring.at(0, linear.k, linear.format, group), x, rows, y};
  team.run([](void* argument, Worker& worker) { static_cast<const Call*>(argument)->run(worker); }, &call);
}

}  // namespace dl
