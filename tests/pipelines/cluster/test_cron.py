from datetime import UTC, datetime

import pytest

from components.shared.errors import PipelineError
from pipelines.cluster.cron import parse
from pipelines.cluster.cron_words import next_times, words

SUNDAY = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meaning", "first"),
    [
        ("0 0 2 * * 1", "at 02:00 UTC on Monday", "Mon 2026-11-23 02:00:00 UTC"),
        ("0 0 2 * * MON-FRI", "at 02:00 UTC on Monday, Tuesday, Wednesday, Thursday and Friday", "Mon 2026-11-23 02:"),
        ("30 15 2,14 * * *", "at 02:15:30 and 14:15:30 UTC every day", "Sun 2026-11-22 14:15:30 UTC"),
        ("0 0 0 1 * *", "at 00:00 UTC on day 1 of the month", "Tue 2026-12-01 00:00:00 UTC"),
        ("0 0 0 1 */3 ?", "at 00:00 UTC on day 1 of the month in January, April, July and October", "Fri 2027-01-01"),
        ("0 */30 * * * *", "at minute 0 and 30 of every hour every day", "Sun 2026-11-22 12:30:00 UTC"),
        ("5 * * * * *", "every minute of every hour, 5 s past it every day", "Sun 2026-11-22 12:00:05 UTC"),
        ("0 0 3 29 FEB *", "at 03:00 UTC on day 29 of the month in February", "Tue 2028-02-29 03:00:00 UTC"),
        ("0 10/20 6 * * *", "at 06:10, 06:30 and 06:50 UTC every day", "Mon 2026-11-23 06:10:00 UTC"),
    ],
)
def test_a_schedule_is_explained_in_words_and_times(text: str, meaning: str, first: str) -> None:
    """Six fields with seconds first, in UTC."""
    cron = parse(text)
    assert words(cron) == meaning
    times = next_times(cron, SUNDAY)
    assert times[0].startswith(first)
    assert len(times) == len(set(times)) == (2 if "FEB" in text else 5)


def test_a_time_that_is_now_is_not_the_next_one() -> None:
    """What has just fired is over."""
    assert next_times(parse("0 0 12 * * *"), SUNDAY, 1) == ["Mon 2026-11-23 12:00:00 UTC"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 10 * * *", 'with these five is "0 10 10 * * *"'),
        ("@daily", 'every day at midnight, for example, is "0 0 0 * * *"'),
        ("0 0 2 * *  * *", "six fields are needed: second minute hour day-of-month month day-of-week; there are 7"),
        ("* 0 2 * * *", "the first field is the second and must be one number, such as 0"),
        ("0 60 2 * * *", "minute: '60' is not among numbers from 0 to 59, as in 5, 1-5, 1,3 or */2"),
        ("0 0 2 * * 7", "day of week: '7' is not among numbers from 0 to 6, or SUN, MON, TUE, WED, THU, FRI, SAT"),
        ("0 0 5-2 * * *", "hour: '5-2' is not among numbers from 0 to 23"),
        ("0 0 */0 * * *", "hour: '*/0' is not among"),
        ("0 0 2 31 FEB *", "there is no such date; it would never fire"),
        ("0 0 2 1 * MON", "a day of month and a day of week would fire on either; leave one of them at *"),
    ],
)
def test_what_would_mean_something_else_is_refused(text: str, message: str) -> None:
    """Kubeflow takes five fields for six without the last; nothing here is guessed."""
    with pytest.raises(PipelineError) as refused:
        parse(text)
    assert str(refused.value).startswith(f'cron "{text}": ')
    assert message in str(refused.value)
