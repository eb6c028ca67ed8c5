"""Convert a model folder to bf16 GGUF: `python -m benchmarks.peers.gguf SOURCE MODEL OUT`.

SOURCE is llama.cpp's source, whose converter is used. The converter recognizes tokenizers by a
hash, but not tokenizers rebuilt from a GGUF file. The benchmarks send token ids, so any tokenizer
name will do.
"""

import sys
from pathlib import Path

from benchmarks.peers.install import converter_packages


def main() -> None:
    source, model, out = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    sys.path.append(str(converter_packages(Path(source).parents[1])))
    import convert_hf_to_gguf  # pyright: ignore
    from conversion.base import TextModel  # pyright: ignore

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    TextModel.no_mtp = True  # models of random weights have no layer of multi-token prediction
    partial = f"{out}.partial"
    sys.argv = ["convert", model, "--outtype", "bf16", "--outfile", partial]
    convert_hf_to_gguf.main()
    Path(partial).rename(out)


if __name__ == "__main__":
    main()
