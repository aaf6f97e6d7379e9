"""The grammar of a whole reply: JSON, calls, or text in which a marker begins calls.

In a text the grammar waits: nothing is asked of it until it has spelled a marker. After calls there is no more text,
because the reader of calls would end the reply there. White space may stand before calls that begin without a marker,
as after thinking.
"""

from holdfast.replicas.constraints.calls import CallRules, Forms
from holdfast.replicas.constraints.lark import Grammar, literal
from holdfast.replicas.constraints.rules import ReplyRule

_TEXT = r"/(.|\n)*/"
_SPACE = r" \t\r\n"


def reply_grammar(rule: ReplyRule, forms: Forms | None) -> str:
    """`rule` in the library's Lark dialect.

    `forms` None: the model writes no calls. Raises ValueError for a rule that the forms cannot follow.
    """
    grammar = Grammar()
    starts: list[str] = []
    if rule.json is not None:
        starts.append(grammar.json("answer", rule.json))
    if rule.calls != "none" and rule.tools and forms is not None:
        calls = CallRules(grammar, rule.tools, rule.parallel)
        if rule.calls == "required" or rule.json is not None:
            starts.append(f"{literal(forms.first.opener)} {calls.after_opener(forms.first)}")
        else:
            starts += _text_or_calls(grammar, calls, forms)
    if not starts:
        starts.append(grammar.add("TEXT", _TEXT))
    return f"start: {' | '.join(starts)}\n{grammar.text}"


def _text_or_calls(grammar: Grammar, calls: CallRules, forms: Forms) -> list[str]:
    starts: list[str] = []
    text = _TEXT
    if forms.bare is not None:
        start = (forms.bare.head + forms.bare.before)[0]
        starts.append(f"{grammar.add('SPACE', rf'/[{_SPACE}]*/')} {calls.after_opener(forms.bare)}")
        text = rf"/[{_SPACE}]*([^{_SPACE}\{start}](.|\n)*)?/"
    grammar.add("TEXT", text)
    starts.append("TEXT")
    for index, form in enumerate(forms.triggered):
        head = grammar.add(f"head{index}[lazy]", f"TEXT {literal(form.opener)}")
        starts.append(f"{head} {calls.after_opener(form)}")
    return starts
