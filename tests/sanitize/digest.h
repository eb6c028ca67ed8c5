// A digest of results, to be compared between builds: 64-bit FNV-1a.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace nano {

class Digest {
 public:
  void bytes(const void* p, size_t n) {
    for (size_t i = 0; i < n; i++) hash_ = (hash_ ^ static_cast<const uint8_t*>(p)[i]) * 0x100000001b3ull;
  }
  // Each NaN counts as the same one: processors make other ones, and choose differently among those that go in.
  void add(const float* p, size_t n) {
    for (size_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, p + i, 4);
      if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fc00000;
      bytes(&bits, 4);
    }
  }
  void add(const uint16_t* p, size_t n) {  // bf16
    for (size_t i = 0; i < n; i++) {
      const uint16_t bits = (p[i] & 0x7fff) > 0x7f80 ? 0x7fc0 : p[i];
      bytes(&bits, 2);
    }
  }
  void add(const uint32_t* p, size_t n) { bytes(p, 4 * n); }
  void add(const int64_t* p, size_t n) { bytes(p, 8 * n); }
  void add(const uint8_t* p, size_t n) { bytes(p, n); }
  void add(const int8_t* p, size_t n) { bytes(p, n); }
  template <class T>
  void add(const std::vector<T>& v) { add(v.data(), v.size()); }

  unsigned long long value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace nano
