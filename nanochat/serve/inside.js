// ---- Inside an answer: each token with its probability, the likeliest alternatives, and its origin

const insides = new WeakMap();  // turn -> its tokens as the server sent them; not stored, because they are long

const KINDS = {  // kinds of tokens, as explained to the reader
  mark: "a format mark, not shown in the answer",
  call: "part of a tool call",
  read: "the tool's result: read by the model, not written",
  asked: "copied from your question",
  quoted: "copied from the passage",
  free: "chosen by the model",
};

/** Take in an event's log-probabilities: `content` has the text's tokens, `others` has marks, calls and results. */
function takeIn(turn, logprobs) {
  if (logprobs) insides.get(turn).push(...(logprobs.others ?? []), ...(logprobs.content ?? []));
}

/** Which stretches of the parts are copies: [from, to, kind], in characters of all parts' text. */
function copies(parts, question) {
  const found = [];
  let from = 0;
  for (const [i, { type, text }] of parts.entries()) {
    const to = from + [...text].length, argument = type === "python" && /^\s*(?:lookup|search|spell)\(\s*["']?(.*?)["']?\s*\)?$/s.exec(text)?.[1];
    const call = parts[i - 2], earlier = call?.type === "python" && parts[i - 1].type === "python_output";
    if (argument && question.includes(argument.trim())) {
      const start = from + [...text.slice(0, text.indexOf(argument))].length;
      found.push([start, start + [...argument].length, "asked"]);
    }
    if (type === "text" && earlier && text.trim() && parts[i - 1].text.includes(text.trim())) found.push([from, to, "quoted"]);
    from = to;
  }
  return found;
}

/** The tokens in the order of the answer, each with its kind. At the same place, tokens without text come first. */
function tokensOf(turn) {
  const tokens = [...insides.get(turn) ?? []], isMark = ({ token }) => /^<\|.*\|>$/.test(token), stretches = copies(turn.parts, turn.question);
  const ends = [];
  for (const { type, text } of turn.parts) ends.push({ type, to: (ends.at(-1)?.to ?? 0) + [...text].length });
  return tokens.sort((a, b) => a.offset - b.offset).map((token) => {
    const type = ends.find(({ to }) => token.offset < to)?.type;
    const copied = stretches.find(([from, to]) => from <= token.offset && token.offset < to);
    const read = isMark(token) ? /output/.test(token.token) : type === "python_output";
    return { ...token, kind: read ? "read" : isMark(token) ? "mark" : copied ? copied[2] : type === "python" ? "call" : "free" };
  });
}

function percent(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.9995 ? "100%" : p < 0.0005 ? "<0.1%" : `${(100 * p).toFixed(1)}%`;
}
/** Blanks and line ends as visible characters. */
function visible(token) { return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣"); }

/** The panel under an answer: its tokens, one of them open. The tab key stops here once; arrow keys move between tokens. */
function lookInside(turn) {
  const tokens = tokensOf(turn), about = el("div", { className: "about", ariaLive: "polite" });
  const open = (at, focus = true) => {
    for (const [i, one] of boxes.entries()) { one.tabIndex = i === at ? 0 : -1; one.ariaPressed = String(i === at); }
    if (focus) boxes[at].focus();
    about.replaceChildren(...explainToken(tokens[at]));
  };
  const boxes = tokens.map((token, i) => {
    const box = el("button", { type: "button", className: `token ${token.kind}`, onclick: () => open(i) }, visible(token.token));
    box.title = token.kind === "read" ? KINDS.read : `${percent(token.logprob)}: ${KINDS[token.kind]}`;
    if (token.kind !== "read") box.style.setProperty("--doubt", Math.round(60 * (1 - Math.exp(token.logprob))) + "%");
    return box;
  });
  const list = el("div", { className: "tokens", role: "toolbar", ariaLabel: "Tokens of the answer" }, ...boxes);
  list.onkeydown = (event) => {
    const at = boxes.indexOf(document.activeElement), to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: boxes.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(Math.max(0, Math.min(boxes.length - 1, to)));
  };
  const kinds = Object.keys(KINDS).filter((kind) => tokens.some((token) => token.kind === kind));
  const legend = el("ul", { className: "small legend" }, ...kinds.map((kind) => el("li", {}, el("span", { className: `token ${kind}` }, kind), KINDS[kind])),
    el("li", {}, "The redder, the less probable."));
  // At first the least probable token that the model wrote is open.
  const written = tokens.map((token, i) => [token.kind === "read" ? 1 : token.logprob, i]);
  open(written.reduce((a, b) => b[0] < a[0] ? b : a)[1], false);
  return el("section", { className: "inside", ariaLabel: "Inside the answer" }, list, about, legend);
}

function explainToken({ token, logprob, kind, top_logprobs: top }) {
  const name = el("code", {}, visible(token));
  if (kind === "read") return [el("p", {}, name, ` ${KINDS.read}`)];
  const likely = [{ token, logprob, own: true }, ...top.filter((other) => other.token !== token).slice(0, 4)];
  const alone = kind === "asked" || kind === "quoted" ? " Only copies were allowed here; the probabilities are the model's own." : "";
  return [el("p", {}, name, ` ${KINDS[kind]}, probability ${percent(logprob)}.${alone}`),
    el("table", {}, el("thead", {}, el("tr", { className: "unseen" }, el("th", { scope: "col" }, "token"), el("th", { scope: "col" }, "probability"))),
      el("tbody", {}, ...likely.map((one) => el("tr", { className: one.own ? "own" : "" }, el("th", { scope: "row" }, el("code", {}, visible(one.token))),
        el("td", { className: "right" }, percent(one.logprob)), el("td", { ariaHidden: "true" }, el("meter", { max: 1, value: Math.exp(one.logprob) }))))))];
}

/** How full the context is after the last answer. */
function showContext() {
  const length = chosen()?.context_length, used = Math.min(chat.used ?? 0, length ?? 0);
  $("context").hidden = !used || !chat.turns.length;
  if (!used) return;
  $("contextBar").max = length;
  $("contextBar").value = used;
  $("contextBar").className = used > 0.9 * length ? "full" : "";
  $("contextText").textContent = `Context: ${used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens`;
}
