#include "draws.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "error.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DL_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"), optimize("O3")))
#else
#define DL_CLONES
#endif

namespace dl {

namespace {

// SplitMix64 and the unit interval as in gpu_worker/sampling/random.py: integers, so every processor gives the same.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;
constexpr int kUniformBits = 52;
constexpr int64_t kChunk = 4096;  // columns per item
constexpr int64_t kScan = 512;    // columns between two looks at the bound
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27)) * kMix2;
  return z ^ (z >> 31);
}

float gumbel(uint64_t bits) {
  const double u = (static_cast<double>(bits >> (64 - kUniformBits)) + 0.5) * 0x1p-52;
  return static_cast<float>(-std::log(-std::log1p(-u)));
}

// Which columns could reach `bound`, as flags[count]. Gumbel noise is at most -log(u), and u at least 2^-(1 + leading
// zeros): a comparison of integers and floats spares nearly every column its two logarithms.
DL_CLONES void flag_candidates(const float* weights, const int64_t* ids, int64_t first, int64_t count, uint64_t key,
                               float bound, uint8_t* flags) {
  constexpr float kLn2 = 0.6931472f, kMargin = 1e-3f;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t id = static_cast<uint64_t>(ids == nullptr ? first + i : ids[i]);
    const uint64_t bits = mix((id + 1) * kGolden + key) | 0x800;  // below the bits that count
    const float most = weights[i] + kLn2 * static_cast<float>(1 + __builtin_clzll(bits)) + kMargin;
    flags[i] = most >= bound ? 1 : 0;
  }
}

struct Draw {
  float value = kNone;
  int64_t column = 0;
};

bool before(const Draw& a, const Draw& b) { return a.value > b.value || (a.value == b.value && a.column < b.column); }

// The best `count` draws so far, in order.
struct Best {
  Draw draws[kMaxDraws];
  int32_t count;
  int32_t size = 0;

  float bound() const { return size < count ? kNone : draws[count - 1].value; }
  void add(const Draw& draw) {
    if (size == count && !before(draw, draws[count - 1])) return;
    int32_t at = size < count ? size++ : count - 1;
    for (; at > 0 && before(draw, draws[at - 1]); at--) draws[at] = draws[at - 1];
    draws[at] = draw;
  }
};

struct Call {
  const float* weights;
  const int64_t* ids;
  int64_t ids_stride;
  const int64_t* keys;
  int64_t rows, n, chunks;
  int32_t count;
  int64_t* columns;
  float* values;
  Best* best;  // [rows, chunks]

  void run(Worker& worker) const {
    worker.phase(rows * chunks, [&](int64_t item) { scan(item / chunks, item % chunks); }, [] {});
    worker.phase(rows, [&](int64_t row) { merge(row); }, [] {});
  }

  void scan(int64_t row, int64_t chunk) const {
    Best& mine = best[row * chunks + chunk];
    mine.count = count;
    const uint64_t key = static_cast<uint64_t>(keys[row]);
    const float* w = weights + row * n;
    const int64_t* names = ids == nullptr ? nullptr : ids + row * ids_stride;
    const int64_t end = std::min(n, (chunk + 1) * kChunk);
    uint8_t flags[kScan];
    const auto draw = [&](int64_t c) {
      if (w[c] == kNone) return;
      const uint64_t id = static_cast<uint64_t>(names == nullptr ? c : names[c]);
      mine.add({w[c] + gumbel(mix((id + 1) * kGolden + key)), c});
    };
    // One good draw to begin with: the heaviest column's gives a bound that most others stay below.
    int64_t heaviest = chunk * kChunk;
    for (int64_t c = heaviest; c < end; c++) heaviest = w[c] > w[heaviest] ? c : heaviest;
    draw(heaviest);
    for (int64_t c0 = chunk * kChunk; c0 < end; c0 += kScan) {
      const int64_t c1 = std::min(end, c0 + kScan);
      flag_candidates(w + c0, names == nullptr ? nullptr : names + c0, c0, c1 - c0, key, mine.bound(), flags);
      for (int64_t c = c0; c < c1; c++) {
        if (flags[c - c0] != 0 && c != heaviest) draw(c);
      }
    }
  }

  void merge(int64_t row) const {
    Best all;
    all.count = count;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const Best& part = best[row * chunks + chunk];
      for (int32_t i = 0; i < part.size; i++) all.add(part.draws[i]);
    }
    for (int32_t i = 0; i < count; i++) {
      const Draw draw = i < all.size ? all.draws[i] : Draw{};
      columns[row * count + i] = draw.column;
      values[row * count + i] = draw.value;
    }
  }
};

}  // namespace

int64_t coupled_key(int64_t seed, int64_t position) {
  constexpr uint64_t kCoupled = 1;  // Purpose.COUPLED
  const uint64_t key = mix(static_cast<uint64_t>(seed) + (kCoupled + 1) * kGolden);
  return static_cast<int64_t>(mix(key + (static_cast<uint64_t>(position) + 1) * kGolden));
}

void run_gumbel_topk(Team& team, const float* weights, const int64_t* ids, int64_t ids_stride, const int64_t* keys,
                     int64_t rows, int64_t n, int32_t count, int64_t* columns, float* values) {
  require(count >= 1 && count <= kMaxDraws, "count: " + std::to_string(count) + " is not in 1..64");
  require(n >= count, "count: " + std::to_string(count) + " of " + std::to_string(n) + " columns");
  if (rows == 0) return;
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  std::vector<Best> best(static_cast<size_t>(rows * chunks));
  Call call{weights, ids, ids_stride, keys, rows, n, chunks, count, columns, values, best.data()};
  team.run([](void* argument, Worker& worker) { static_cast<const Call*>(argument)->run(worker); }, &call);
}

}  // namespace dl
