// Options, environment, and what happened beside the steps.
"use strict";
(() => {
  const { el, number, duration } = relay;
  const KINDS = { lost: "bad", stopped: "bad", went_back: "warn", checkpoint_damaged: "bad", recovered: "good", finished: "good" };
  const SENTENCES = {
    started: () => "the run started",
    resumed: (e) => `the run was taken up again after step ${e.step ?? "?"}`,
    lost: (e) => `${e.role} was lost: ${e.reason}`,
    recovered: (e) => `${e.role} is back after ${duration(e.after_s)}`,
    went_back: (e) => `training went back to step ${e.to_step}`,
    checkpoint_damaged: (e) => `a checkpoint is damaged: it is set aside as ${e.set_aside}`,
    stopped: (e) => `the run stopped: ${e.reason}`,
    finished: () => "the run finished",
  };

  relay.events = (host) =>
    relay.perRun(host, (run, i, body) => {
      if (!run.events.length) {
        body.append(el("p.empty", {}, "No events are recorded."));
        return;
      }
      const start = run.events[0].time;
      if (run.num_events > run.events.length) body.append(el("p.card-note", {}, `the latest ${number(run.events.length)} of ${number(run.num_events)}`));
      body.append(
        el(
          "ol.events",
          {},
          run.events.map((event) =>
            el(
              `li.${KINDS[event.event] || "plain"}`,
              { "data-event": event.event },
              el("time", {}, typeof event.time === "number" ? `${relay.moment(event.time)}  +${duration(event.time - start)}` : ""),
              el("span", {}, (SENTENCES[event.event] || ((e) => JSON.stringify(e)))(event)),
            ),
          ),
        ),
      );
    });

  relay.config = (host) => {
    const { differences } = relay.report;
    if (relay.compares)
      host.append(
        el("h3", {}, `What differs between the runs (${differences.length})`),
        differences.length
          ? el(
              relay.many ? "table.options.many" : "table.options",
              {},
              el("tr", {}, el("th", {}, "option"), relay.runs.map((_, i) => el("th", {}, relay.runName(i)))),
              differences.map(({ path, values }) => el("tr", {}, el("td", {}, el("code", {}, path)), values.map((value) => el("td", {}, el("code", {}, value ?? "absent"))))),
            )
          : el("p.empty", {}, "Nothing."),
      );
    relay.perRun(host, (run, i, body) => {
      if (!run.config.length) {
        body.append(el("p.empty", {}, "No options are known."));
        return;
      }
      const changed = run.config.filter((row) => "default" in row);
      if (run.config_note) body.append(el("p.card-note", {}, run.config_note));
      if (!run.config_note)
        body.append(
          el("h3", {}, `What differs from ${run.facts.config} (${changed.length})`),
          changed.length ? options(changed, ["option", "this run", run.facts.config]) : el("p.empty", {}, "Nothing."),
        );
      const all = options(run.config, ["option", "value"]);
      const filter = (event) => {
        for (const tr of all.querySelectorAll("tr[data-path]")) tr.hidden = !tr.dataset.path.includes(event.target.value.trim());
      };
      body.append(
        el(
          "details.group",
          {},
          el("summary", {}, el("b", {}, "all options"), el("span.hint", {}, ` ${run.config.length}`)),
          el(".toolbar", {}, el("input", { type: "search", placeholder: "find an option", oninput: filter, "aria-label": "find an option" })),
          all,
        ),
      );
    });
  };

  const options = (rows, heads) =>
    el(
      "table.options",
      {},
      el("tr", {}, heads.map((text) => el("th", {}, text))),
      rows.map((row) =>
        el(
          "tr",
          { "data-path": row.path },
          el("td", {}, el("code", {}, row.path)),
          el("td", {}, el("code", {}, row.value)),
          heads.length > 2 ? el("td", {}, el("code.before", {}, row.default)) : null,
        ),
      ),
    );

  const LABELS = { num_cpus: "processors", memory_gib: "memory, GiB", cpu: "processor", gpus: "GPUs" };

  relay.environment = (host) =>
    relay.perRun(host, (run, i, body) => {
      const { environment, processes } = run;
      const { packages = {}, variables = {}, ...machine } = environment;
      const table = (entries) => el("table.plain", {}, entries.map(([name, value]) => el("tr", {}, el("td", {}, LABELS[name] || name), el("td", {}, Array.isArray(value) ? value.join(", ") || "none" : typeof value === "number" ? number(value) : String(value)))));
      const cards = [
        ["Machine", Object.entries(machine)],
        ["Packages", Object.entries(packages)],
        ["Variables", Object.entries(variables)],
        ["Processes", processes.map((process) => [`${process.role} ${process.rank}`, `process ${process.pid} on ${process.host}`])],
      ].filter(([, entries]) => entries.length);
      body.append(
        cards.length
          ? el(".columns", {}, cards.map(([title, entries]) => el(".card", {}, el("h3", {}, title), table(entries))))
          : el("p.empty", {}, "This run left no record of where it ran (environment.json)."),
      );
    });
})();
