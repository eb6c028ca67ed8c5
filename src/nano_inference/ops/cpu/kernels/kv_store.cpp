#include "kv_store.h"

#include "transpose.h"

namespace nano {

template <class T>
void store_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, const T* key,
              const T* value) {
  int64_t start = layer.start(head, slot / block_size), offset = slot % block_size;
  if (is_packed(block_size)) {
    int64_t group = start + offset / LANES * LANES * head_dim, lane = offset % LANES;
    pack_key(layer.keys + group, head_dim, lane, key);
    if (!layer.keys_are_values()) pack_value(layer.values + group, head_dim, lane, value);
  } else {
    int64_t row = start + offset * head_dim;
    memcpy(layer.keys + row, key, head_dim * sizeof(T));
    if (!layer.keys_are_values()) memcpy(layer.values + row, value, head_dim * sizeof(T));
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
      value[d] = layer.keys_are_values() ? key[d] : values[d * depth];
    }
  } else {
    int64_t row = start + offset * head_dim;
    memcpy(key, layer.keys + row, head_dim * sizeof(T));
    memcpy(value, layer.values + row, head_dim * sizeof(T));
  }
}

template <class T>
void values_of_keys(const T* keys, int64_t head_dim, T* values) {
  constexpr int depth = DEPTH<T>, width = LANES * depth;  // numbers of a token that are turned at once
  for (int64_t d = 0; d < head_dim; d += width) {
    const int64_t count = head_dim - d < width ? head_dim - d : width;
    IVec words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = i * depth < count ? iload(keys + (d + i * depth) * LANES) : iset(0);
    transpose(words);
    T rows[LANES][width];
    for (int token = 0; token < LANES; token++) istore(rows[token], words[token]);
    for (int token = 0; token < LANES; token += depth) {
      T* to = values + token * head_dim + d * depth;
      for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < depth; j++) to[i * depth + j] = rows[token + j][i];
    }
  }
}

template void values_of_keys(const bf16*, int64_t, bf16*);
template void values_of_keys(const float*, int64_t, float*);
template void store_kv(const KvLayer<bf16>&, int64_t, int64_t, int64_t, int64_t, const bf16*, const bf16*);
template void store_kv(const KvLayer<float>&, int64_t, int64_t, int64_t, int64_t, const float*, const float*);
template void read_kv(const KvLayer<bf16>&, int64_t, int64_t, int64_t, int64_t, bf16*, bf16*);
template void read_kv(const KvLayer<float>&, int64_t, int64_t, int64_t, int64_t, float*, float*);

}  // namespace nano
