"""`CACHES`: the kinds of KV cache, by their name in the configuration."""

from nano_inference.config import CacheType
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.kv_cache.radix import RadixKVCache

KVCache = PagedKVCache | RadixKVCache

CACHES: dict[CacheType, type[KVCache]] = {
    "paged": PagedKVCache,
    "radix": RadixKVCache,
}
