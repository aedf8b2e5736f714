// Attention of some (row, head) pairs over one block of 128 keys. Included in an instruction set's namespace.

inline const Pair* as_pairs(const uint8_t* p) { return reinterpret_cast<const Pair*>(p); }

// Fetches the tiles of the next block in address order, a few lines with every step of the products: spread evenly,
// since too many at a time only wait for each other.
class Fetcher {
 public:
  explicit Fetcher(const AttentionBlock& b)
      : tiles_(b.next),
        end_(b.next + b.num_next),
        lines_(static_cast<int>(b.head_dim / 2 + (b.head_dim + 15) / 16 * 8)),
        at_a_time_(kLines * kTilePairs / (b.num_pairs > kTilePairs ? b.num_pairs : kTilePairs) + 1) {}
  void step() {
    if (tiles_ == end_) return;
    const uint8_t* p = *tiles_ + line_ * 64;
    for (int i = 0; i < at_a_time_; i++) prefetch_far(p + i * 64);
    line_ += at_a_time_;
    if (line_ >= lines_) {
      line_ = 0;
      tiles_++;
    }
  }

 private:
  static constexpr int kLines = 3;
  const uint8_t* const* tiles_;
  const uint8_t* const* end_;
  const int lines_;
  const int at_a_time_;
  int line_ = 0;
};

// Scores of P pairs against G groups of 16 keys.
template <int P, int G>
static void score_tile(const AttentionBlock& b, int pair0, int group0, Fetcher& fetcher) {
  F acc[P][G];
  const Pair* q[P];
  for (int p = 0; p < P; p++) {
    q[p] = as_pairs(b.queries[pair0 + p]);
    for (int g = 0; g < G; g++) acc[p][g] = fzero();
  }
  const int64_t steps = b.head_dim / 2;
  for (int64_t i = 0; i < steps; i++) {
    I k[G];
    for (int g = 0; g < G; g++) k[g] = iload(b.keys[group0 + g] + i * 64);
    fetcher.step();
    for (int p = 0; p < P; p++) {
      for (int g = 0; g < G; g++) acc[p][g] = dot_pair(acc[p][g], k[g], q[p] + i);
    }
  }
  for (int p = 0; p < P; p++) {
    for (int g = 0; g < G; g++) fstore(b.scores + (pair0 + p) * kBlockKeys + (group0 + g) * 16, acc[p][g]);
  }
}

template <int P>
static void score_pairs(const AttentionBlock& b, int pair0, int groups, Fetcher& fetcher) {
  int g = 0;
  if constexpr (P <= kTilePairs / 2) {
    for (; g + kWideGroups <= groups; g += kWideGroups) score_tile<P, kWideGroups>(b, pair0, g, fetcher);
  }
  for (; g + kTileGroups <= groups; g += kTileGroups) score_tile<P, kTileGroups>(b, pair0, g, fetcher);
  for (; g < groups; g++) score_tile<P, 1>(b, pair0, g, fetcher);
}

// Weights 2^(score - maximum) of one pair's visible keys, zero from there to the end of the last group of 16.
static void soften(const AttentionBlock& b, int pair) {
  const int keys = b.num_keys[pair];
  float* scores = b.scores + pair * kBlockKeys;
  auto* weights = reinterpret_cast<Pair*>(b.weights) + pair * (kBlockKeys / 2);
  const F lowest = fset(-__builtin_inff());
  F peak = lowest;
  const int whole = keys / 16 * 16;
  for (int i = 0; i < whole; i += 16) peak = fmax(peak, fload(scores + i));
  if (whole < keys) peak = fmax(peak, fkeep_n(fload(scores + whole), keys - whole, -__builtin_inff()));
  const float maximum = flargest(peak);
  const F shift = fset(maximum);
  F total = fzero();
  for (int i = 0; i < keys; i += 16) {
    F e = exp2_lanes(fsub(fload(scores + i), shift));
    if (i + 16 > keys) e = fkeep_n(e, keys - i, 0.0f);
    total = fadd(total, store_pairs(weights + i / 2, e));
  }
  b.maximum[pair] = maximum;
  b.total[pair] = fsum(total);
}

// Weighted values of P pairs over key pairs begin .. end - 1, V vectors of 16 values from vector v0 on.
template <int P, int V>
static void value_tile(const AttentionBlock& b, int pair0, int begin, int end, bool drop_last, int v0,
                       Fetcher& fetcher) {
  const int64_t padded = (b.head_dim + 15) / 16 * 16;
  const int64_t row_bytes = padded * 4;
  const auto* weights = as_pairs(b.weights) + pair0 * (kBlockKeys / 2);
  float* out = b.output + pair0 * padded + v0 * 16;
  F acc[P][V];
  for (int p = 0; p < P; p++) {
    for (int v = 0; v < V; v++) acc[p][v] = begin == 0 ? fzero() : fload(out + p * padded + v * 16);
  }
  const int whole = drop_last ? end - 1 : end;
  for (int j = begin; j < whole; j++) {
    const uint8_t* row = b.values[j / 8] + (j % 8) * row_bytes + v0 * 64;
    fetcher.step();
    I k[V];
    for (int v = 0; v < V; v++) k[v] = iload(row + v * 64);
    for (int p = 0; p < P; p++) {
      for (int v = 0; v < V; v++) acc[p][v] = dot_pair(acc[p][v], k[v], weights + p * (kBlockKeys / 2) + j);
    }
  }
  if (drop_last) {
    // The last pair's second key does not exist: its slot may hold anything, NaN included.
    const uint8_t* row = b.values[whole / 8] + (whole % 8) * row_bytes + v0 * 64;
    for (int v = 0; v < V; v++) {
      const I k = drop_odd(iload(row + v * 64));
      for (int p = 0; p < P; p++) acc[p][v] = dot_pair(acc[p][v], k, weights + p * (kBlockKeys / 2) + whole);
    }
  }
  for (int p = 0; p < P; p++) {
    for (int v = 0; v < V; v++) fstore(out + p * padded + v * 16, acc[p][v]);
  }
}

template <int P>
static void value_pairs(const AttentionBlock& b, int pair0, int begin, int end, bool drop_last, Fetcher& fetcher) {
  const int vectors = static_cast<int>((b.head_dim + 15) / 16);
  int v = 0;
  constexpr int kVectors = P <= kTilePairs / 2 ? kWideVectors : kTileVectors;
  for (; v + kVectors <= vectors; v += kVectors) {
    value_tile<P, kVectors>(b, pair0, begin, end, drop_last, v, fetcher);
  }
  for (; v < vectors; v++) value_tile<P, 1>(b, pair0, begin, end, drop_last, v, fetcher);
}

template <int P>
struct PairSwitch {
  static void score(int count, const AttentionBlock& b, int pair0, int groups, Fetcher& fetcher) {
    if (count == P) return score_pairs<P>(b, pair0, groups, fetcher);
    PairSwitch<P - 1>::score(count, b, pair0, groups, fetcher);
  }
  static void value(int count, const AttentionBlock& b, int pair0, int begin, int end, bool drop_last,
                    Fetcher& fetcher) {
    if (count == P) return value_pairs<P>(b, pair0, begin, end, drop_last, fetcher);
    PairSwitch<P - 1>::value(count, b, pair0, begin, end, drop_last, fetcher);
  }
};
template <>
struct PairSwitch<0> {
  static void score(int, const AttentionBlock&, int, int, Fetcher&) {}
  static void value(int, const AttentionBlock&, int, int, int, bool, Fetcher&) {}
};

inline int min_int(int a, int b) { return a < b ? a : b; }

static void attention_block(const AttentionBlock& b) {
  int most = 0, least = kBlockKeys;
  for (int p = 0; p < b.num_pairs; p++) {
    most = b.num_keys[p] > most ? b.num_keys[p] : most;
    least = min_int(b.num_keys[p], least);
  }
  const int groups = (most + 15) / 16;
  Fetcher fetcher(b);
  for (int p = 0; p < b.num_pairs; p += kTilePairs) {
    PairSwitch<kTilePairs>::score(min_int(kTilePairs, b.num_pairs - p), b, p, groups, fetcher);
  }
  for (int p = 0; p < b.num_pairs; p++) soften(b, p);
  // Key pairs that every (row, head) sees whole are walked together, the rest for those that see the same keys.
  const int common = most == least && most % 2 == 0 ? most / 2 : least / 16 * 8;
  if (common > 0) {
    for (int p = 0; p < b.num_pairs; p += kTilePairs) {
      PairSwitch<kTilePairs>::value(min_int(kTilePairs, b.num_pairs - p), b, p, 0, common, false, fetcher);
    }
  }
  for (int p = 0; p < b.num_pairs;) {
    const int keys = b.num_keys[p];
    int count = 1;
    while (count < kTilePairs && p + count < b.num_pairs && b.num_keys[p + count] == keys) count++;
    if ((keys + 1) / 2 > common) {
      PairSwitch<kTilePairs>::value(count, b, p, common, (keys + 1) / 2, keys % 2 == 1, fetcher);
    }
    p += count;
  }
}

static void attention_merge(int64_t pairs, float* maximum, float* total, float* output, const float* block_maximum,
                            const float* block_total, const float* block_output, int64_t padded) {
  for (int64_t first = 0; first < pairs; first += 16) {
    const int64_t count = pairs - first < 16 ? pairs - first : 16;
    const F old_peak = fload_n(maximum + first, count), new_peak = fload_n(block_maximum + first, count);
    const F peak = fmax(old_peak, new_peak);
    const F old_scale = exp2_lanes(fsub(old_peak, peak)), new_scale = exp2_lanes(fsub(new_peak, peak));
    const F sum = fma(fload_n(block_total + first, count), new_scale, fmul(fload_n(total + first, count), old_scale));
    fstore_n(maximum + first, peak, count);
    fstore_n(total + first, sum, count);
    float old_scales[16], new_scales[16];
    fstore(old_scales, old_scale);
    fstore(new_scales, new_scale);
    for (int64_t p = 0; p < count; p++) {
      const F old_factor = fset(old_scales[p]), new_factor = fset(new_scales[p]);
      float* to = output + (first + p) * padded;
      const float* from = block_output + (first + p) * padded;
      for (int64_t i = 0; i < padded; i += 16) {
        fstore(to + i, fma(fload(from + i), new_factor, fmul(fload(to + i), old_factor)));
      }
    }
  }
}

static void attention_finish(float total, const float* output, int64_t head_dim, float* out) {
  const F inverse = fset(1.0f / total);
  for (int64_t i = 0; i < head_dim; i += 16) {
    const int64_t n = head_dim - i < 16 ? head_dim - i : 16;
    fstore_n(out + i, fmul(fload(output + i), inverse), n);
  }
}
