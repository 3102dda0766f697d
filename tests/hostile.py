"""Text that wants to be more than text: what a session, an answer or a name may hold."""

MARK = "window.hit"
"""Set by any of these that runs in a browser."""

REMOTE = "evil.example"
"""The host that any of these would fetch from."""

HOSTILE = [
    f"<script>{MARK}=1</script>",
    f"</script><script>{MARK}=1</script><!--",
    f"<img src=x onerror='{MARK}=1'>",
    f"<svg onload='{MARK}=1'><animate onbegin='{MARK}=1' attributeName=x dur=1s>",
    f"<iframe srcdoc='<script>parent.{MARK}=1</script>'></iframe>",
    f"<style>@import 'http://{REMOTE}/a.css'; body {{ display: none }}</style>",
    f"<link rel=stylesheet href=http://{REMOTE}/a.css><base href=http://{REMOTE}/>",
    f"<meta http-equiv=refresh content='0;url=http://{REMOTE}/'>",
    f"<form action=http://{REMOTE}/><button autofocus>go</button></form>",
    f"<details open ontoggle='{MARK}=1'>",
    f"![pixel](http://{REMOTE}/pixel.png)",
    f"![pixel][p]\n\n[p]: http://{REMOTE}/pixel.png",
    f"[click](javascript:{MARK}=1)",
    f"[click](  JaVaScRiPt:{MARK}=1 'title')",
    f"<javascript:{MARK}=1>",
    "[data](data:text/html;base64,PHNjcmlwdD53aW5kb3cuaGl0PTE8L3NjcmlwdD4=)",
    f"plain http://{REMOTE}/a and www.{REMOTE} and someone@{REMOTE}",
    f"| a | b |\n| --- | --- |\n| ![x](http://{REMOTE}/t.png) | <b onclick='{MARK}=1'>x</b> |",
    f"```\n<script>{MARK}=1</script>\n```\n![x](http://{REMOTE}/f.png)",
    f"`````html\n<img src=http://{REMOTE}/g.png>",
    f"~~~\n</code></pre><img src=x onerror='{MARK}=1'>",
    "# heading\n\n* list\n\n> quote\n\n---\n\n*emphasis* __strong__ ~~gone~~",
    f"&lt;script&gt;{MARK}=1&lt;/script&gt; &#60;script&#62;",
    f"{{{{constructor.constructor('{MARK}=1')()}}}} ${{{MARK}=1}} <%= 7*7 %> {{% 7*7 %}}",
    f"\u2028</textarea><img src=x onerror='{MARK}=1'>\u2029",
    f"\\![x](http://{REMOTE}/h.png) \\[x](javascript:{MARK}=1)",
    "\x1b[2J\x1b[1;1H\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;ZWNobyBoaXQ=\x07\x1bP+q544e\x1b\\\x1b[6n\x1b[?1049h",
    "\x9b31m\x9d0;title\x9c\x90q\x9c",
    "safe\rhidden\x08\x08\x7f\x00end",
    "user\u202egnp.exe\u2066 \u200f[/red] [bold]markup[/bold] :smile:",
]
"""Script, links, images and style in HTML and Markdown; templates; terminal escapes; turned text."""

TERMINAL_CONTROLS = frozenset(
    {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u2028\u2029\u200e\u200f"}
    | {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
) - {"\n"}
"""What no terminal may be sent from a session's text."""
