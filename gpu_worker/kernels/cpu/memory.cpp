#include "memory.hpp"

#include <sys/mman.h>

#include <mutex>
#include <string>

#include "error.hpp"

namespace dl {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSharedMapping = size_t{32} << 20;
constexpr size_t kLargestShared = kSharedMapping / 4;

// A mapping that begins on a huge page.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(bytes + kHugePage) {
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address_ == MAP_FAILED) throw Error("cannot allocate " + std::to_string(bytes) + " bytes");
    const auto begin = (reinterpret_cast<uintptr_t>(address_) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<uint8_t*>(begin);
    if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);  // a refusal only costs speed
  }
  ~Mapping() { munmap(address_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  size_t bytes_;
  void* address_;
  uint8_t* data_;
};

// Hands out pieces of one mapping after another; a mapping lives as long as one of its pieces.
struct SharedMappings {
  std::mutex mutex;
  std::shared_ptr<Mapping> current;
  size_t used = 0;

  std::pair<std::shared_ptr<Mapping>, uint8_t*> take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    // With the last piece gone, the rest of the mapping is not worth keeping.
    if (current == nullptr || current.use_count() == 1 || used + bytes > kSharedMapping) {
      current = std::make_shared<Mapping>(kSharedMapping);
      used = 0;
    }
    uint8_t* piece = current->data() + used;
    used += (bytes + 63) / 64 * 64;
    return {current, piece};
  }
};

SharedMappings& shared_mappings() {
  static auto* mappings = new SharedMappings;  // outlives every handle that Python still holds at exit
  return *mappings;
}

}  // namespace

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes <= kLargestShared) {
    auto [mapping, piece] = shared_mappings().take(bytes);
    mapping_ = std::move(mapping);
    data_ = piece;
  } else {
    auto mapping = std::make_shared<Mapping>(bytes);
    data_ = mapping->data();
    mapping_ = std::move(mapping);
  }
}

}  // namespace dl
