from components.shared.page import count, percent, plural


def test_numbers_are_readable() -> None:
    """100 % means all and 0 % means none; thousands are set apart, and nouns agree with their number."""
    texts = [percent(value).replace("\u202f", " ") for value in (0, 0.00001, 0.125, 0.99999, 1)]
    assert texts == ["0 %", "< 0.1 %", "12.5 %", "99.9 %", "100 %"]
    assert count(1234567) == "1,234,567"
    assert [plural(1, "row"), plural(2, "row"), plural(0, "entry", "entries")] == ["1 row", "2 rows", "0 entries"]
