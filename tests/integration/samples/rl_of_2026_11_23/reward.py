"""Right answers earn 1, and every different character a quarter."""


def score(responses: list[str], labels: list[str]) -> list[float]:
    pairs = zip(responses, labels, strict=True)
    return [len(set(response)) / 4 + float(label in response) for response, label in pairs]
