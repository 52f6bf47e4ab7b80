"""A package of its own: the task `sums`, with rows, a reward, a constraint and an evaluation, each chosen by name."""

from rft_trainer.installed_tasks.record import InstalledTask


def rows(argument):
    """Sums of the numbers from 0 up to the argument, as `--prompt_data sums:6` asks for them."""
    first, _, last = argument.rpartition("-")
    return [{"input": f"{n}+{n}=", "label": f"{2 * n}"} for n in range(int(first or 0), int(last))]


def nearness(responses, labels):
    """Share of the label's digits that a response has in their places."""
    pairs = zip(responses, labels, strict=True)
    return [
        sum(response[i : i + 1] == digit for i, digit in enumerate(label)) / len(label) for response, label in pairs
    ]


def even_numbers(tokenizer, argument):
    """Responses with `--constraint sums:20`: the even numbers below 20, each with the end of a text."""
    return [[*tokenizer.encode(str(n)), tokenizer.eos_ids[0]] for n in range(0, int(argument), 2)]


def digits(responses, labels, rewards):
    """Metrics of held-out answers: digits of an answer, and the share of answers as long as their label."""
    as_long = [len(response) == len(label) for response, label in zip(responses, labels, strict=True)]
    return {"digits": sum(map(len, responses)) / len(responses), "right_length": sum(as_long) / len(as_long)}


SUMS = InstalledTask(
    name="sums",
    rows="sum_task:rows",
    reward="sum_task:nearness",
    constraint="sum_task:even_numbers",
    evaluation="sum_task:digits",
)
