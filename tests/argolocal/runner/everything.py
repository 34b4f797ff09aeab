"""A manifest with every kind of template."""

EVERYTHING = """
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  onExit: say
  arguments: {parameters: [{name: x, value: "1", enum: ["1", "2"]}]}
  hooks: {running: {expression: workflow.status == "Running", template: say}}
  synchronization: {mutexes: [{name: m}]}
  templateDefaults: {timeout: 1m}
  templates:
  - name: main
    parallelism: 2
    steps:
    - - {name: a, template: say, arguments: {parameters: [{name: x, value: "{{workflow.parameters.x}}"}]},
         when: "1 == 1"}
      - {name: b, template: tasks, continueOn: {failed: true}}
    - - {name: c, template: say, withSequence: {count: "2"}, hooks: {exit: {template: say}}}
  - name: tasks
    dag:
      failFast: false
      tasks:
      - {name: d, template: say, withItems: [1, {k: v}, [2]]}
      - {name: e, depends: d.Succeeded || d.Failed, inline: {suspend: {duration: 1s}}}
  - name: say
    inputs: {parameters: [{name: x, default: "0"}], artifacts: [{name: f, path: /tmp/f, raw: {data: text}}]}
    retryStrategy: {limit: 2, backoff: {duration: 1s, factor: 2, cap: 1m}, expression: "asInt(lastRetry.exitCode) > 0"}
    memoize: {key: "k-{{inputs.parameters.x}}", maxAge: 1h, cache: {configMap: {name: kept}}}
    volumes: [{name: work, emptyDir: {}}]
    initContainers: [{name: i, image: busybox, command: ["true"]}]
    container: {image: busybox, command: [sh, -c], args: ["echo {{=asInt(inputs.parameters.x) + 1}}"],
      env: [{name: A, value: b}], volumeMounts: [{name: work, mountPath: /work}]}
    outputs: {parameters: [{name: out, valueFrom: {path: /tmp/y, default: "2"}}], artifacts: [{name: g, path: /tmp/g}]}
"""
