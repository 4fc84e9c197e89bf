// Converts Markdown to elements. All of them are made here from text: an answer cannot bring a script, an image or a
// style into the page, and no address except in a link to http or https.

import { button, make } from "./dom.js";

const MAX_DEPTH = 8; // levels of nested lists and quotes; deeper ones are plain text
const MAX_OPEN = 32; // the most open emphasis marks; more are plain text, so that no answer can take long

// A mark ends where its character does, and one look-ahead finds a backtick: even a long line is read only once.
const FENCE = /^\s*(`{3,}(?!`)|~{3,}(?!~))(?=[^`]*$)\s*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^\s*([-*+]|(\d{1,9})[.)])(?: +|$)/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~\n])/,
    /(?<ticks>`+)/,
    /!?\[(?<label>[^[\]]*)\]\((?<href>https?:\/\/[^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?:\s+"[^"]*")?\)/,
    /<?(?<address>(?<!\w)https?:\/\/[^\s<>*`"[\]]*[^\s<>*`"[\].,;:!?')])>?/,
    /(?<emphasis>\*+|_+|~~)/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "gi",
);
const EMPHASIS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** A growing answer. Only blocks that changed are replaced, so that a reader's selection stays. */
export class MarkdownText {
  element = make("div", { className: "markdown" });
  #sources = [];

  update(text) {
    const blocks = [...split(text.split("\n"), 0)];
    const sources = blocks.map(({ lines }) => lines.join("\n"));
    const same = sources.findIndex((source, i) => source !== this.#sources[i]);
    const kept = same < 0 ? sources.length : same;
    this.#sources = sources;
    while (this.element.children.length > kept) this.element.lastElementChild.remove();
    this.element.append(...blocks.slice(kept).map(({ kind, lines }) => kind.build(lines, 0)));
  }
}

// ---- blocks ----

// Each kind of block finds where a block starts and the line before which it ends, and makes its element.

const CODE = {
  starts: (line) => FENCE.test(line),
  end(lines, start) {
    return endOf(lines, start, (line) => !closes(line, lines[start])) + 1; // without an end, the block is still growing
  },
  build([first, ...rest]) {
    if (rest.length && closes(rest.at(-1), first)) rest.pop();
    const text = rest.map((line) => dedent(line, indent(first))).join("\n");
    const bar = make("div", { className: "bar" }, FENCE.exec(first)[2], button("copy-code", "Copy"));
    return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", {}, text)));
  },
};

const TITLE = {
  starts: (line) => HEADING.test(line),
  end: (lines, start) => start + 1,
  build([line]) {
    const [mark, marks] = HEADING.exec(line);
    const level = Math.min(marks.length + 2, 6); // the page itself uses the first two levels
    return make(`h${level}`, {}, ...inline(line.slice(mark.length).trim().replace(/\s#+$/, "")));
  },
};

const BREAK = {
  starts: (line) => RULE.test(line),
  end: (lines, start) => start + 1,
  build: () => make("hr"),
};

const CITATION = {
  starts: (line) => QUOTE.test(line),
  end: (lines, start) => endOf(lines, start, (line) => QUOTE.test(line)),
  build: (lines, depth) => make("blockquote", {}, ...render(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
};

const LIST = {
  starts: (line) => ITEM.test(line),
  end(lines, start) {
    const isInside = (line, i) => {
      if (indent(line) >= indent(lines[start]) + 2) return true;
      if (ITEM.test(line) && !RULE.test(line)) return isOrdered(line) === isOrdered(lines[start]);
      return !isBlank(lines[i - 1]) && !isOther(line, lines[i + 1]); // an item's text continues
    };
    let end = start + 1;
    // An empty line belongs to the list if more of the list follows.
    for (let i = end; i < lines.length; i++) {
      if (isBlank(lines[i])) continue;
      if (!isInside(lines[i], i)) break;
      end = i + 1;
    }
    return end;
  },
  build(lines, depth) {
    const items = [];
    for (const line of lines) {
      const mark = indent(line) < indent(lines[0]) + 2 && ITEM.exec(line);
      if (mark) items.push({ width: mark[0].length, lines: [line.slice(mark[0].length)] });
      else items.at(-1).lines.push(dedent(line, items.at(-1).width));
    }
    const list = isOrdered(lines[0]) ? make("ol", { start: Number(ITEM.exec(lines[0])[2]) }) : make("ul");
    list.append(...items.map((item) => make("li", {}, ...render(item.lines, depth + 1))));
    return list;
  },
};

const TABLE = {
  starts: (line, next) =>
    line.includes("|") && next.includes("|") && TABLE_RULE.test(next.trim()) && cells(line).length === cells(next).length,
  end: (lines, start) => endOf(lines, start + 1, (line) => line.includes("|")),
  build([head, rule, ...rows]) {
    const sides = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
    const row = (tag, line) => {
      const texts = cells(line);
      const made = sides.map((side, i) => make(tag, {}, ...inline(texts[i] ?? "")));
      made.forEach((cell, i) => (cell.style.textAlign = sides[i]));
      return make("tr", {}, ...made);
    };
    const body = make("tbody", {}, ...rows.map((line) => row("td", line)));
    return make("div", { className: "table" }, make("table", {}, make("thead", {}, row("th", head)), body));
  },
};

const PARAGRAPH = {
  starts: () => true,
  end: (lines, start) => endOf(lines, start, (line, i) => !isBlank(line) && !isOther(line, lines[i + 1])),
  build: (lines) => make("p", {}, ...inline(lines.join("\n"))), // newlines stay: models mean line breaks
};

const OTHERS = [CODE, TITLE, BREAK, CITATION, LIST, TABLE];

// Returns whether a line ends the paragraph before it. "2024. That year" does not: it may be the end of a sentence.
function isOther(line, next = "") {
  const number = ITEM.exec(line)?.[2];
  return OTHERS.some((kind) => kind.starts(line, next)) && (number === undefined || number === "1");
}

function* split(lines, depth) {
  const kinds = depth < MAX_DEPTH ? [...OTHERS, PARAGRAPH] : [PARAGRAPH];
  for (let start = 0; start < lines.length; ) {
    if (isBlank(lines[start])) {
      start++;
      continue;
    }
    const kind = kinds.find(({ starts }) => starts(lines[start], lines[start + 1] ?? ""));
    const end = kind.end(lines, start);
    yield { kind, lines: lines.slice(start, end) };
    start = end;
  }
}

const render = (lines, depth) => [...split(lines, depth)].map(({ kind, lines }) => kind.build(lines, depth));

// Returns the first line after `start` that does not belong to the block.
function endOf(lines, start, goesOn) {
  let end = start + 1;
  while (end < lines.length && goesOn(lines[end], end)) end++;
  return end;
}

function closes(line, first) {
  const [, mark] = FENCE.exec(first);
  const rest = line.trim();
  return rest.length >= mark.length && rest === mark[0].repeat(rest.length);
}

const isBlank = (line) => !line.trim();
const isOrdered = (line) => ITEM.exec(line)[2] !== undefined;
const indent = (line) => /^\s*/.exec(line)[0].replaceAll("\t", "    ").length;
const dedent = (line, width) => (width ? line.replace(new RegExp(`^(?:\t| {0,${width}})`), "") : line);

// Returns a row's cells. "\|" is no border.
function cells(row) {
  const inside = row.trim().replace(/^\||(?<!\\)\|$/g, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

// ---- inside a block ----

// Makes text and elements in one pass. Emphasis that ends wraps the nodes since its beginning.
function inline(text, hasLinks = true) {
  const nodes = [];
  const open = []; // {mark, at}: emphasis that has begun, with the index of its mark in `nodes`
  const unpaired = new Set(); // backticks that have no partner in the rest of the text
  const pattern = new RegExp(INLINE);
  let at = 0;
  for (let match; (match = pattern.exec(text)); at = pattern.lastIndex) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const { escaped, ticks, label, href, address, emphasis } = match.groups;
    if (escaped) nodes.push(escaped);
    else if (ticks) {
      const end = unpaired.has(ticks) ? -1 : partner(text, ticks, pattern.lastIndex);
      if (end < 0) {
        unpaired.add(ticks);
        nodes.push(ticks);
      } else {
        nodes.push(make("code", {}, text.slice(pattern.lastIndex, end).trim()));
        pattern.lastIndex = end + ticks.length;
      }
    } else if (emphasis) emphasize(nodes, open, emphasis, text[match.index - 1] ?? " ", text[pattern.lastIndex] ?? " ");
    else if (!hasLinks) nodes.push(match[0]);
    else if (href) nodes.push(link(href, inline(label || href, false)));
    else nodes.push(link(address, [address]));
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function emphasize(nodes, open, run, before, after) {
  const isWord = (character) => run[0] === "_" && /[\p{L}\p{N}]/u.test(character); // snake_case is no emphasis
  let left = run.length;
  while (before.trim() && !isWord(after)) {
    const i = open.findLastIndex(({ mark }) => mark[0] === run[0] && mark.length <= left);
    if (i < 0) break;
    const { mark, at } = open[i];
    const [, ...inside] = nodes.splice(at);
    nodes.push(make(EMPHASIS[mark], {}, ...inside));
    open.length = i;
    left -= mark.length;
  }
  while (left && after.trim() && !isWord(before)) {
    const mark = run.slice(0, Math.min(left, 2));
    open.push({ mark, at: nodes.push(mark) - 1 });
    if (open.length > MAX_OPEN) open.shift();
    left -= mark.length;
  }
  if (left) nodes.push(run.slice(0, left));
}

// Finds the next run of exactly as many backticks.
function partner(text, ticks, from) {
  for (let start = text.indexOf(ticks, from); start >= 0; ) {
    let end = start;
    while (text[end] === "`") end++;
    if (end - start === ticks.length) return start;
    start = text.indexOf(ticks, end);
  }
  return -1;
}

const link = (href, children) => make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...children);
