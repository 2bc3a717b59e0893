"""A reward of the kind that users write: by import path, with verl's signature."""


def share_of_small_numbers(data_source, solution_str, ground_truth, extra_info) -> float:
    """Share of the numbers in the response that are below 30."""
    numbers = [int(x) for x in solution_str.split()]
    return sum(x < 30 for x in numbers) / len(numbers) if numbers else 0.0
