#include "kv_store.h"

namespace nano {

template <class T>
void store_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, const T* key,
              const T* value) {
  int64_t start = layer.start(head, slot / block_size), offset = slot % block_size;
  if (is_packed(block_size)) {
    int64_t group = start + offset / LANES * LANES * head_dim, lane = offset % LANES;
    pack_key(layer.keys + group, head_dim, lane, key);
    pack_value(layer.values + group, head_dim, lane, value);
  } else {
    int64_t row = start + offset * head_dim;
    memcpy(layer.keys + row, key, head_dim * sizeof(T));
    memcpy(layer.values + row, value, head_dim * sizeof(T));
  }
}

template <class T>
void read_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, T* key,
             T* value) {
  constexpr int depth = DEPTH<T>;
  int64_t start = layer.start(head, slot / block_size), offset = slot % block_size;
  if (is_packed(block_size)) {
    int64_t group = start + offset / LANES * LANES * head_dim, lane = offset % LANES;
    const T* keys = layer.keys + group + lane * depth;
    const T* values = layer.values + group + lane / depth * depth * head_dim + lane % depth;
    for (int64_t d = 0; d < head_dim; d++) {
      key[d] = keys[d / depth * depth * LANES + d % depth];
      value[d] = values[d * depth];
    }
  } else {
    int64_t row = start + offset * head_dim;
    memcpy(key, layer.keys + row, head_dim * sizeof(T));
    memcpy(value, layer.values + row, head_dim * sizeof(T));
  }
}

template void store_kv(const KvLayer<bf16>&, int64_t, int64_t, int64_t, int64_t, const bf16*, const bf16*);
template void store_kv(const KvLayer<float>&, int64_t, int64_t, int64_t, int64_t, const float*, const float*);
template void read_kv(const KvLayer<bf16>&, int64_t, int64_t, int64_t, int64_t, bf16*, bf16*);
template void read_kv(const KvLayer<float>&, int64_t, int64_t, int64_t, int64_t, float*, float*);

}  // namespace nano
