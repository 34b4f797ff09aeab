// Appends new lines to the logs of a run that has not finished. A log whose user has scrolled up
// stays where it is; the button Follow returns to its end.

// The browser keeps this many lines of a log. Older ones are on another page of the log.
const MAX_LINES = 5000;
// While the user reads earlier lines, this many lines are kept; then the log stops until the user follows it again.
const MAX_KEPT_LINES = 20000;

class FollowedLog {
  constructor(view) {
    this.view = view;
    this.region = view.querySelector(".log");
    this.lines = view.querySelector(".lines");
    this.button = view.querySelector(".follow");
    const numbers = this.lines.querySelectorAll(".line-number");
    this.position = new URL(view.dataset.follow, location).searchParams.get("from");
    // the number of the last complete line, or null if the lines have no numbers
    this.number = numbers.length ? Number(numbers[numbers.length - 1].textContent) : null;
    this.isFollowing = true;
    this.missed = 0;
    this.stream = null;
    this.isFull = false;

    this.button.hidden = false;
    this.button.addEventListener("click", () => this.follow());
    this.region.addEventListener("scroll", () => this.onScroll(), { passive: true });
    document.addEventListener("visibilitychange", () => this.connect());
    this.connect();
  }

  // A browser has few connections to a server, so only visible pages use one.
  connect() {
    if (document.visibilityState === "hidden" || this.isFull) {
      this.stream?.close();
      this.stream = null;
      return;
    }
    if (this.stream) return;
    const address = new URL(this.view.dataset.follow, location);
    address.searchParams.set("from", this.position);
    this.stream = new EventSource(address);
    this.stream.addEventListener("lines", (event) => this.add(event));
    this.stream.onerror = () => {
      if (this.stream?.readyState !== EventSource.CLOSED) return;
      this.stream = null;
      setTimeout(() => this.connect(), 1000);
    };
  }

  add(event) {
    const news = JSON.parse(event.data);
    this.position = news.end;
    // number of pixels above the first visible line
    const top = this.region.scrollTop + this.region.scrollHeight;

    this.removeRest();
    if (news.skipped) {
      this.number = null;
      this.lines.append(note(`${news.skipped.toLocaleString("en")} bytes are not shown`));
    }
    for (const line of news.lines) {
      if (this.number !== null) this.number += 1;
      this.lines.append(makeLine(line, this.number));
    }
    if (news.rest) {
      this.rest = makeLine(news.rest, this.number === null ? null : this.number + 1);
      this.lines.append(this.rest);
    }
    this.lines.querySelector(":scope > p")?.remove();

    if (this.isFollowing) {
      while (this.lines.childElementCount > MAX_LINES) this.lines.firstElementChild.remove();
      this.region.scrollTop = 0;
    } else {
      this.missed += news.lines.length;
      this.region.scrollTop = top - this.region.scrollHeight;
      this.isFull = this.lines.childElementCount > MAX_KEPT_LINES;
      if (this.isFull) this.connect();
      this.show();
    }
  }

  // The line that is being written comes again when it is longer or complete.
  removeRest() {
    if (this.rest === undefined) {
      // the server has rendered it as the last line
      const last = this.lines.lastElementChild;
      this.rest = last?.dataset.rest === undefined ? null : last;
      if (this.rest && this.number !== null) this.number -= 1;
    }
    this.rest?.remove();
    this.rest = null;
  }

  onScroll() {
    const isAtEnd = this.region.scrollTop > -8;
    if (isAtEnd === this.isFollowing) return;
    this.isFollowing = isAtEnd;
    this.missed = 0;
    this.show();
  }

  follow() {
    if (this.isFull) location.reload();
    this.isFollowing = true;
    this.missed = 0;
    this.region.scrollTop = 0;
    this.show();
  }

  show() {
    this.button.setAttribute("aria-pressed", String(this.isFollowing));
    this.button.textContent = this.missed ? `Follow (${this.missed} new lines)` : "Follow";
  }
}

function makeLine(line, number) {
  const element = document.createElement("div");
  element.className = line.is_error ? "line is-error" : "line";
  if (number !== null) element.append(makeSpan("line-number", number));
  element.append(makeSpan("line-text", line.text));
  if (line.cut) element.append(makeSpan("line-note", `${line.cut.toLocaleString("en")} bytes more`));
  return element;
}

function makeSpan(name, text) {
  const span = document.createElement("span");
  span.className = name;
  span.textContent = text;
  return span;
}

function note(text) {
  const element = document.createElement("div");
  element.className = "line";
  element.append(makeSpan("line-note", text));
  return element;
}

for (const view of document.querySelectorAll("[data-follow]")) new FollowedLog(view);
