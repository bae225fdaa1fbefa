"""lm-evaluation-harness on a served model and on transformers: the numbers of both, side by side.

    python tests/conformance/lm_eval_side_by_side.py FOLDER URL

FOLDER: a Hugging Face checkpoint with its tokenizer; URL: of a server of the same checkpoint in float32, such as
http://127.0.0.1:8000. Run from the root of the repository, with an interpreter that has lm-eval[api,hf], transformers
and torch. Ends with 1 where two numbers differ by more than 0.1%.
"""

import argparse
import sys

TASKS = ["tiny_choices", "tiny_rolling"]
FOLDER_OF_TASKS = "tests/conformance/data/lm_eval"
MOST = 1e-3
"""Relative difference of two numbers that are the same but for float32 sums in another order."""


def main() -> int:
    """Run both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("url")
    args = parser.parse_args()
    served = results(
        "local-completions",
        {
            "model": args.folder,
            "base_url": f"{args.url}/v1/completions",
            "tokenizer": args.folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_length": 256,
        },
    )
    plain = results("hf", {"pretrained": args.folder, "dtype": "float32", "device": "cpu", "max_length": 256})
    differ = False
    print(f"{'task and metric':40} {'served':>14} {'transformers':>14}")
    for name, value in served.items():
        same = abs(value - plain[name]) <= MOST * max(abs(value), abs(plain[name]))
        differ = differ or not same
        print(f"{name:40} {value:14.6f} {plain[name]:14.6f}{'' if same else '  differ'}")
    return int(differ or served.keys() != plain.keys())


def results(model: str, model_args: dict[str, object]) -> dict[str, float]:
    """ "task metric" -> number."""
    # Deferred: an interpreter of its own has it.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=FOLDER_OF_TASKS, include_defaults=False)
    found = simple_evaluate(
        model=model, model_args=model_args, tasks=TASKS, task_manager=manager, bootstrap_iters=0, batch_size=1
    )
    return {
        f"{task} {metric.removesuffix(',none')}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


if __name__ == "__main__":
    sys.exit(main())
