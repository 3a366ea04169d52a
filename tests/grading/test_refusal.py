"""Answers that are none, though they may be equal to the expected one."""

import pytest

from components.grading.decision import RefusedError
from components.grading.refusal import refuse
from components.grading.spelling import read


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        # parts that are not printed or not meant
        ("5", r"\phantom{5}"),
        ("5", r"x\hphantom{5}"),
        ("5", r"\not=5"),
        ("5", r"\cancel{6}5"),
        ("5", r"\sout{6}5"),
        ("5", r"\def\a{6}5"),
        ("5", "5 % 6"),
        ("720", "3!!"),
        # what takes too long
        ("5", "100000!"),
        ("5", "(123456)!"),
        ("5", "2^{100000}"),
        ("5", "9^{9^9}"),
        ("5", r"\binom{100000}{5}"),
        ("5", "(" * 9 + "5" + ")" * 9),
        # rows that are none
        ("5", "1 2 3 4 5 6 7 8 9 10 11 12 13"),
        ("5", "------5"),
        ("5", "||||5||||" + "|"),
        # a question left open
        ("5050", r"\sum_{k=1}^{100} k"),
        ("120", r"\prod_{k=1}^5 k"),
        ("5", r"\int_0^5 dx"),
        ("2", r"\lim_{x\to1} 2x"),
        ("6", r"\gcd(12,18)"),
        ("6", "gcd(12,18)"),
        ("36", r"\operatorname{lcm}(12,18)"),
        ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
        ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ("3", r"\max(2,3)"),
        ("2x", r"\frac{d}{dx}x^2"),
        ("2", r"\frac{\partial y}{\partial x}"),
        # other primes and accents
        ("x", "x'"),
        ("x'", "x"),
        ("x'", "x''"),
        ("A", "A^T"),
        ("x", r"\bar{x}"),
        (r"\vec{v}", "v"),
        (r"\vec{v}", r"\hat{v}"),
        ("f(x)", r"f^{\prime}(x)"),
        # several boxes
        ("5", r"\boxed{5} \text{ or } \boxed{6}"),
    ],
)
def test_what_hides_or_asks_is_refused(gold: str, answer: str) -> None:
    """The grader neither does the work, nor passes over what its reader of LaTeX does not see."""
    with pytest.raises(RefusedError):
        refuse(read(gold), read(answer))


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "5"),
        (r"35\%", "35"),
        ("35", r"35\%"),
        ("120", "5!"),
        ("n!!", "n!!+0"),
        ("120", "9999!"),
        ("5", "2^{9999}"),
        ("2^{100000}", "2^{100000}+0"),
        ("5", "((((((((5))))))))"),
        ("5", "()" * 9),
        ("2^{10}", "1024"),
        (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j"),
        (r"\int x\,dx", r"\int y\,dy"),
        ("f'(x)", "f'(x)+0"),
        (r"A^T", "A^T B"),
        (r"\vec{v}", r"2\vec{v}"),
        (r"\frac{1}{3}", r"0.\overline{3}"),
        (r"0.\overline{3}", "0.333"),
        (r"\log 2", r"\lambda"),
        (r"\maximum", r"\intercept"),
        (r"\frac12d", r"\frac{d}{2}"),
    ],
)
def test_what_is_asked_for_is_not_refused(gold: str, answer: str) -> None:
    """A sum is an answer where a sum is expected, and a repeating decimal is a number."""
    refuse(read(gold), read(answer))
