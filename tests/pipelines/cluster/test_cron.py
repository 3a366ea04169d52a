from datetime import UTC, datetime

import pytest

from components.shared.errors import PipelineError
from pipelines.cluster import cron

SUNDAY = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meaning", "first"),
    [
        ("0 0 2 * * 1", "At 02:00, only on Monday (UTC)", "Mon 2026-11-23 02:00:00 UTC"),
        ("0 0 2 * * MON-FRI", "At 02:00, Monday through Friday (UTC)", "Mon 2026-11-23 02:"),
        (
            "30 15 2,14 * * *",
            "At 30 seconds past the minute, at 15 minutes",
            "Sun 2026-11-22 14:15:30 UTC",
        ),
        ("0 0 0 1 * *", "At 00:00, on day 1 of the month (UTC)", "Tue 2026-12-01 00:00:00 UTC"),
        ("0 0 0 1 */3 ?", "At 00:00, on day 1 of the month, every 3 months (UTC)", "Fri 2027-01-01"),
        ("0 */30 * * * *", "Every 30 minutes", "Sun 2026-11-22 12:30:00 UTC"),
        ("5 * * * * *", "At 5 seconds past the minute", "Sun 2026-11-22 12:00:05 UTC"),
        ("0 0 3 29 FEB *", "At 03:00, on day 29 of the month, only in February (UTC)", "Tue 2028-02-29 03:00:00 UTC"),
        ("0 10/20 6 * * *", "Every 20 minutes, starting at 10 minutes past the hour", "Mon 2026-11-23 06:10:00 UTC"),
        ("0 0 12 * * *", "At 12:00, every day (UTC)", "Mon 2026-11-23 12:00:00 UTC"),
    ],
)
def test_a_schedule_is_described_in_words_and_times(text: str, meaning: str, first: str) -> None:
    """Six fields with seconds first, in UTC; a time that is now is over."""
    cron.check(text)
    assert cron.describe(text).startswith(meaning)
    times = cron.next_times(text, SUNDAY)
    assert times[0].startswith(first)
    assert len(set(times)) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 10 * * *", 'with these five is "0 10 10 * * *"'),
        ("@daily", 'day-of-week, such as "0 0 2 * * 1"'),
        ("0 0 2 * *  * *", "six fields are needed"),
        ("* 0 2 * * *", "the first field is the second and must be one number, such as 0"),
        ("0 60 2 * * *", "out of range"),
        ("0 0 */0 * * *", "step '0'"),
        ("0 0 2 L * *", "'L' is none of *, 5, 1-5, MON-FRI, 1,3, */2"),
        ("0 0 2 31 FEB *", "never fires"),
        ("0 0 2 1 * MON", "a day of month and a day of week would fire on either; leave one at *"),
    ],
)
def test_an_expression_with_another_meaning_is_refused(text: str, message: str) -> None:
    """Kubeflow takes five fields for six without the last; nothing here is guessed."""
    with pytest.raises(PipelineError) as refused:
        cron.check(text)
    assert str(refused.value).startswith(f'cron "{text}": ')
    assert message in str(refused.value)
